"""FP8 rows with E8M0 scales to bfloat16 on the host (spec 3), in passes of numpy that stay in the CPU's caches."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engram_trt.runtime.engram.files import Bytes

Bfloat16Bits = npt.NDArray[np.uint16]

GROUP = 32
BLOCK_ROWS = 512
"""Rows at a time: few enough to stay in the cache of a core, enough to forget the calls."""
_EXACT_SCALES = (3, 134)
"""Scale bytes whose products are normal bfloat16 or exact subnormals, and whose factor below fits a float."""

# An E4M3 byte whose sign goes to bit 31 and whose other bits go to 20..26 is, read as a float32, its value times
# 2^-120, subnormals included: both formats count in powers of two below their smallest exponent.
_SHIFT = np.int32(1 << 20)
_BITS = np.array(0x87F00000, dtype=np.uint32).view(np.int32)[()]
_UNDO_EXPONENT = 120 - 127
_HALF = np.uint32(16)


class Dequantizer:
    """Working memory for rows of one width; one thread at a time.

    Args:
        width: features of a row.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        # Kept between calls: fresh memory of this size costs more than the arithmetic.
        self._values = np.empty((BLOCK_ROWS, width), dtype=np.float32)
        self._factors = np.empty((BLOCK_ROWS * width // GROUP, GROUP), dtype=np.float32)

    def convert(self, rows: Bytes, scales: Bytes, out: Bfloat16Bits) -> None:
        """Dequantise rows: fp8 * 2^(e - 127) of the feature's group of 32, rounded to nearest even.

        Args:
            rows: uint8 [n, width], E4M3.
            scales: uint8 [n, width / 32], E8M0.
            out: uint16 [n, width], receives bfloat16 bits.
        """
        for start in range(0, rows.shape[0], BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            if _needs_table(rows[block], scales[block]):
                _by_table(rows[block], scales[block], out[block])
            else:
                self._convert_block(rows[block], scales[block], out[block])

    def _convert_block(self, rows: Bytes, scales: Bytes, out: Bfloat16Bits) -> None:
        values = self._values[: rows.shape[0]]
        factors = self._factors[: rows.shape[0] * self.width // GROUP]
        bits = values.view(np.int32)
        np.copyto(bits, rows.view(np.int8))
        np.multiply(bits, _SHIFT, out=bits)
        np.bitwise_and(bits, _BITS, out=bits)
        np.take(_factors(), scales.reshape(-1), axis=0, out=factors, mode="clip")
        np.multiply(values, factors.reshape(values.shape), out=values)
        # The lower half is zero: four bits of mantissa, and no rounding. Two dense passes beat a strided copy.
        halves = values.view(np.uint32)
        np.right_shift(halves, _HALF, out=halves)
        np.copyto(out, halves, casting="unsafe")


def _needs_table(rows: Bytes, scales: Bytes) -> bool:
    """Whether a block has codes that are not numbers, or scales at the ends of the range."""
    if not rows.size:
        return False
    most, (lowest, highest) = np.maximum.reduce, _EXACT_SCALES
    has_nan = most(rows, axis=None) == 0xFF or most(rows.view(np.int8), axis=None) == 0x7F
    is_extreme = np.minimum.reduce(scales, axis=None) < lowest or most(scales, axis=None) > highest
    return bool(has_nan or is_extreme)


def _by_table(rows: Bytes, scales: Bytes, out: Bfloat16Bits) -> None:
    codes = scales.astype(np.intp)[:, :, None] * 256 + rows.reshape(rows.shape[0], -1, GROUP)
    out[:] = products()[codes].reshape(rows.shape)


@lru_cache(maxsize=1)
def _factors() -> npt.NDArray[np.float32]:
    """[256, 32]: what turns the shifted bits into the value, per scale byte, repeated for a group."""
    exponents = np.minimum(np.arange(256) + _UNDO_EXPONENT, 127).astype(np.int32)
    return np.repeat(np.ldexp(np.float32(1), exponents)[:, None], GROUP, axis=1)


@lru_cache(maxsize=1)
def products() -> Bfloat16Bits:
    """uint16 [65536]: bfloat16 bits for every scale byte (times 256) and code."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(
        exponent > 0, np.ldexp(1.0 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8.0, np.full(256, -6))
    )
    values = np.where(codes & 0x80, -magnitude, magnitude)
    values[(codes & 0x7F) == 0x7F] = np.nan
    scales = np.ldexp(1.0, np.arange(256) - 127)
    scales[255] = np.nan
    products = (values[None, :] * scales[:, None]).astype(np.float64)
    return _round_to_bfloat16(products).reshape(-1)


def _round_to_bfloat16(values: npt.NDArray[np.float64]) -> Bfloat16Bits:
    """Nearest even; the values have few bits, so the way through float32 rounds once."""
    with np.errstate(over="ignore", under="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
