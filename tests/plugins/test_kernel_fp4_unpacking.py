"""The machine instructions that unpack FP4 codes, executed here one by one on every byte.

The interpreter cannot run them, so this is their proof without a GPU: shifts and masks on 32-bit words, and a
product of two bfloat16 pairs, whose results are compared with the values of the format's definition.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from engram_trt.plugins.float_tables import E2M1_PAIR_TABLE
from engram_trt.plugins.kernels.fp4_unpacking import LARGEST_EXPONENT, SUM_FACTOR, UNPACK_FP4_ASM

WORD = 0xFFFFFFFF
ORDER = (0, 2, 1, 3)
"""Bytes of a word in the order their columns come out."""


def halves(word: int) -> Tensor:
    """The two bfloat16 of a word, low half first, as float32."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32) << 16
    return bits.view(torch.float32)


def product(a: int, b: int, c: int) -> int:
    """fma.rn.bf16x2: every product is rounded once to bfloat16."""
    exact = halves(a).double() * halves(b).double() + halves(c).double()
    low, high = exact.to(torch.bfloat16).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after straight-line code of shl, shr, and, or, mov and fma.rn.bf16x2; refuses anything else."""
    registers = dict(inputs)

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in text.replace("{", "").replace("}", "").split(";"):
        statement = line.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, _, rest = statement.partition(" ")
        target, *operands = re.split(r",\s*", rest.strip())
        numbers = [value(operand) for operand in operands]
        if name == "mov.b32":
            registers[target] = numbers[0]
        elif name == "shl.b32":
            registers[target] = numbers[0] << numbers[1] & WORD
        elif name == "shr.b32":
            registers[target] = numbers[0] >> numbers[1]
        elif name == "and.b32":
            registers[target] = numbers[0] & numbers[1]
        elif name == "or.b32":
            registers[target] = numbers[0] | numbers[1]
        elif name == "fma.rn.bf16x2":
            registers[target] = product(*numbers)
        else:
            raise ValueError(f"unknown instruction {name}")
    return registers


def unpack(word: int, exponent: int) -> tuple[Tensor, Tensor]:
    """Even and odd weights of four bytes in byte order, as the kernel's sums see them after their factor."""
    factor = 0x7FC0 if exponent > LARGEST_EXPONENT.value else (exponent + 94) << 7
    pair = factor | factor << 16
    registers = run(UNPACK_FP4_ASM.value, {"$4": word, "$5": pair, "$6": pair})
    planes = []
    for first, second in (("$0", "$1"), ("$2", "$3")):
        columns = torch.cat([halves(registers[first]), halves(registers[second])]) * SUM_FACTOR.value
        planes.append(columns[torch.tensor(ORDER)])
    return planes[0], planes[1]


@pytest.mark.parametrize("exponent", [30, 94, 110, 119, 127, 160])
def test_every_byte_in_every_place(exponent: int) -> None:
    scale = 2.0 ** (exponent - 127)
    for start in range(256):
        codes = [(start + step * 67) % 256 for step in range(4)]
        even, odd = unpack(sum(code << 8 * place for place, code in enumerate(codes)), exponent)
        expected = E2M1_PAIR_TABLE[torch.tensor(codes)] * scale
        assert torch.equal(even, expected[:, 0])
        assert torch.equal(odd, expected[:, 1])


def test_a_scale_that_does_not_fit_gives_nan() -> None:
    even, odd = unpack(0x71717171, 161)
    assert bool(torch.isnan(even).all())
    assert bool(torch.isnan(odd).all())


def test_negative_zero_keeps_its_sign() -> None:
    even, _ = unpack(0x08080808, 127)
    assert torch.equal(torch.signbit(even), torch.ones(4, dtype=torch.bool))
