"""What a kernel launch is, as plain data: no torch, no Triton, no CUDA.

A plan is computed from shapes, dtypes, attributes and the compute capability alone. The torch dispatch runs it
through Triton's just-in-time compiler, the tests through its interpreter, and a TensorRT plugin can launch the
precompiled cubins of the same variants with `pack_arguments`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass

ConstantValue = int | float | bool | str

WORKSPACE_ALIGNMENT = 256
MAX_GRID = (2**31 - 1, 65535, 65535)

BYTES_OF = {"float32": 4, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
"""Sizes of the dtypes an operand may have."""

TRITON_NAME = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}
"""Dtype names of the contracts -> names in a Triton signature."""

SHARED_MEMORY_LIMIT = {89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Bytes of shared memory one program may use, by compute capability."""

MULTIPROCESSORS = {89: 128, 90: 132, 100: 148, 103: 148, 120: 170}
"""Multiprocessors of a typical GPU by compute capability: how many programs fill it. It decides speed only."""

# Triton compiles scratch pointers (global, profile) into every entry, behind the declared arguments.
TRAILING_POINTERS = 2

CType = type[ctypes.c_void_p] | type[ctypes.c_int32] | type[ctypes.c_int64] | type[ctypes.c_float]
CTYPE_OF_SCALAR: Mapping[str, CType] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
INTERPRET = "INTERPRET"
"""Name of the constexpr that is True only under the interpreter, whose bfloat16 casts and products are wrong."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BYTES_OF[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation of one Triton function: everything that decides its machine code but the target.

    Args:
        op: op type, e.g. "CacheWrite".
        module: module that holds the function.
        function: its name.
        signature: run-time arguments in order, name -> Triton type ("*bf16", "i32", ...).
        constants: constexpr arguments, name -> value.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        unaligned: pointer arguments that need not lie on 16 bytes.
    """

    op: str
    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, ConstantValue], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    unaligned: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Readable and unique among an op's variants: types of the pointers that vary, constants, warps."""
        types = ",".join(kind for _, kind in self.signature if kind.startswith("*"))
        constants = ",".join(f"{name}={value}" for name, value in self.constants if name != INTERPRET)
        return f"{self.function}[{types}|{constants}|w{self.num_warps}s{self.num_stages}]"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Argument: address of an operand, output or workspace buffer."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """Argument: a number known on the host."""

    value: int | float


Argument = Pointer | Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch. `arguments` are in the order of the variant's signature."""

    variant: Variant
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        if len(self.arguments) != len(self.variant.signature):
            raise ValueError(f"{self.variant.label}: {len(self.arguments)} arguments")
        for (name, kind), argument in zip(self.variant.signature, self.arguments, strict=True):
            if kind.startswith("*") != isinstance(argument, Pointer):
                raise ValueError(f"{self.variant.label}: argument {name} is {argument}, its type {kind}")
        for extent, limit in zip(self.grid, MAX_GRID, strict=True):
            if not 1 <= extent <= limit:
                raise ValueError(f"{self.variant.label}: grid {self.grid} outside 1..{MAX_GRID}")


@dataclass(frozen=True, slots=True)
class Clear:
    """Step: fill a workspace buffer with zero bytes."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A part of the workspace."""

    name: str
    info: TensorInfo
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The launches of one call of an op, in order.

    Args:
        op: op type.
        steps: launches and clears; empty where there is nothing to do.
        workspace: scratch buffers, by offset into one allocation.
        workspace_bytes: size of that allocation.
    """

    op: str
    steps: tuple[Launch | Clear, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    workspace_bytes: int = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))


def lay_out_workspace(buffers: Mapping[str, TensorInfo]) -> tuple[tuple[Buffer, ...], int]:
    """Place buffers one after the other, each on `WORKSPACE_ALIGNMENT`; returns them and the total bytes."""
    placed, offset = [], 0
    for name, info in buffers.items():
        placed.append(Buffer(name=name, info=info, offset_bytes=offset))
        offset += ceil_div(info.num_bytes, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return tuple(placed), offset


def make_launch(variant: Variant, grid: tuple[int, int, int], arguments: Mapping[str, str | int | float]) -> Launch:
    """A launch from arguments by name: a string names a tensor, a number is a scalar.

    Raises:
        ValueError: names and signature differ, or the grid is empty or too large.
    """
    names = [name for name, _ in variant.signature]
    if set(names) != set(arguments):
        raise ValueError(
            f"{variant.label}: arguments {sorted(arguments)} are not those of the signature {sorted(names)}"
        )
    values = (arguments[name] for name in names)
    packed = tuple(Pointer(value) if isinstance(value, str) else Scalar(value) for value in values)
    return Launch(variant=variant, grid=grid, arguments=packed)


def pack_arguments(launch: Launch, addresses: Mapping[str, int]) -> tuple[tuple[int | float, ...], tuple[CType, ...]]:
    """Values and C types of a launch's kernel parameters, as `cuLaunchKernel` of `cuda.bindings` takes them.

    Args:
        launch: one launch of a plan.
        addresses: device address of every operand, output and workspace buffer by name.

    Returns:
        Values and types, the two null scratch pointers that Triton appends included.
    """
    values: list[int | float] = []
    types: list[CType] = []
    for (_, kind), argument in zip(launch.variant.signature, launch.arguments, strict=True):
        if isinstance(argument, Pointer):
            values.append(addresses[argument.tensor])
            types.append(ctypes.c_void_p)
        else:
            values.append(argument.value)
            types.append(CTYPE_OF_SCALAR[kind])
    values.extend([0] * TRAILING_POINTERS)
    types.extend([ctypes.c_void_p] * TRAILING_POINTERS)
    return tuple(values), tuple(types)
