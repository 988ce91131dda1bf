"""Rows straight from a table to bfloat16 in one loop of machine code, where numba is installed.

numpy needs a dozen passes over copies of the rows; this loop reads each row once, where it lies. It gives the bits
of `Dequantizer` and is loaded by the first call that is worth it, never by an import: numba takes half a second.
What is compiled is kept by numba beside this file or in the user's cache folder, as Python keeps its own; where
neither can be written to, every process compiles for itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.runtime.engram.dequantize import GROUP, Bfloat16Bits, products
from engram_trt.runtime.engram.scales import SCALE_NAN
from engram_trt.runtime.engram.tables import Located

COMPILE_ROWS = 4096
"""A call of so many rows loads the compiled loop; numpy does fewer in a few milliseconds."""

Convert = Callable[[Located, Bfloat16Bits], int]
"""(located, out [n, width]) -> -1, or row * blocks + block of a scale that is not a number, where it stopped."""

_BLOCK = 32
"""Rows whose cache lines are asked for before the first of them is used: their way from memory overlaps."""
_LINE = np.uint64(64)
_LOWEST, _HIGHEST = 10, 246
"""Scale bytes that keep every product, but those of codes that are not numbers, a normal bfloat16."""
_NAN_CODE = 127
_lock = threading.Lock()


def compiled_convert(num_rows: int) -> Convert | None:
    """The loop, or None where numba is not installed or a call of `num_rows` does not pay for loading it."""
    if num_rows < COMPILE_ROWS and not _load.cache_info().currsize:
        return None
    with _lock:
        return _load()


@lru_cache(maxsize=1)
def _load() -> Convert | None:
    if find_spec("numba") is None:
        return None
    try:
        loop = _compile()
    except Exception as cause:  # noqa: BLE001 - whatever a compiler fails by, numpy gives the same bits
        warnings.warn(f"numba cannot be used ({cause!r}): rows are dequantised by numpy", RuntimeWarning, stacklevel=3)
        return None

    def convert(located: Located, out: Bfloat16Bits) -> int:
        found = loop(located.rows, located.row_starts, located.scales, located.scale_starts, products(), out)
        return int(found[0])

    return convert


def _compile() -> Callable[..., Any]:
    """The loop for the types of `Located`, from numba's cache where there is one."""
    from numba import njit, types

    table = types.Array(types.uint8, 1, "C", readonly=True)
    starts, bits = types.Array(types.int64, 1, "C"), types.Array(types.uint16, 1, "C")
    signature = (table, starts, table, starts, bits, types.Array(types.uint16, 2, "C"))
    try:
        return _compiled(njit(signature, nogil=True, cache=True))
    except Exception:  # noqa: BLE001 - no folder for a cache, or what a crash left in one
        return _compiled(njit(signature, nogil=True))


def _compiled(decorate: Callable[[Callable[..., Any]], Any]) -> Callable[..., Any]:
    loop: Callable[..., Any] = decorate(convert_rows)
    return loop


def convert_rows(
    rows: npt.NDArray[np.uint8],
    row_starts: npt.NDArray[np.int64],
    scales: npt.NDArray[np.uint8],
    scale_starts: npt.NDArray[np.int64],
    table: npt.NDArray[np.uint16],
    out: npt.NDArray[np.uint16],
) -> tuple[int, np.uint64]:
    """What is compiled; plain Python runs it as well, some thousand times slower.

    With m the code without its sign and a scale of 2^(e - 127), the product is, as the bits of a bfloat16, a line
    in m for every power of two: 128 m, 64 m + 128, 32 m + 256 below the smallest normal code and 16 m + 384 above,
    each plus 128 (e - 10). The slopes fall, so the right line is the lowest one. This is arithmetic of 16 bits,
    which a compiler makes into vectors, and no mode of the processor's floating point can change it.

    Args:
        rows, scales: uint8, the bytes in which the starts count.
        row_starts, scale_starts: int64 [n].
        table: uint16 [65536], bfloat16 bits of every scale byte and code.
        out: uint16 [n, width], receives bfloat16 bits.

    Returns:
        as `Convert`, and a number without a meaning: it keeps the compiler from dropping the early reads.
    """
    # Numbers without a sign as indices: with one, every access would ask whether it counts from the end.
    count, width = out.shape
    num_groups, size = np.uint64(width // GROUP), np.uint64(GROUP)
    flat = out.reshape(-1)
    touched = np.uint64(0)
    for first in range(0, count, _BLOCK):
        last = min(first + _BLOCK, count)
        # Reads, not prefetches: those are dropped where the address is not in the TLB, so for nearly every row.
        for i in range(first, last):
            line, end = np.uint64(row_starts[i]), np.uint64(row_starts[i] + width - 1)
            touched += np.uint64(scales[np.uint64(scale_starts[i])]) + np.uint64(rows[end])
            while line + np.uint64(3) * _LINE <= end:
                touched += np.uint64(rows[line]) + np.uint64(rows[line + _LINE])
                touched += np.uint64(rows[line + np.uint64(2) * _LINE]) + np.uint64(rows[line + np.uint64(3) * _LINE])
                line += np.uint64(4) * _LINE
        for i in range(first, last):
            source, scale, target = np.uint64(row_starts[i]), np.uint64(scale_starts[i]), np.uint64(i * width)
            largest = np.uint8(0)
            for k in range(np.uint64(width)):
                largest = max(largest, np.uint8(rows[source + np.uint64(k)] & np.uint8(_NAN_CODE)))
            low, high = np.uint8(SCALE_NAN), np.uint8(0)
            for g in range(num_groups):
                low = min(low, scales[scale + np.uint64(g)])
                high = max(high, scales[scale + np.uint64(g)])
            if largest == _NAN_CODE or low < _LOWEST or high > _HIGHEST:
                for g in range(num_groups):
                    exponent = np.int64(scales[scale + np.uint64(g)])
                    if exponent == SCALE_NAN:
                        return i * int(num_groups) + int(g), touched
                    for k in range(np.uint64(g) * size, (np.uint64(g) + np.uint64(1)) * size):
                        pair = exponent * 256 + np.int64(rows[source + np.uint64(k)])
                        flat[target + np.uint64(k)] = table[pair]
                continue
            for g in range(num_groups):
                base = np.uint16((np.int64(scales[scale + np.uint64(g)]) - _LOWEST) << 7)
                for k in range(size):
                    code = np.uint16(np.int8(rows[source + np.uint64(k)]))  # the sign goes to bit 15
                    m = np.uint16(code & np.uint16(0x7F))
                    line_0, line_1 = np.uint16(m << np.uint16(7)), np.uint16((m << np.uint16(6)) + np.uint16(128))
                    line_2 = np.uint16((m << np.uint16(5)) + np.uint16(256))
                    line_3 = np.uint16((m << np.uint16(4)) + np.uint16(384))
                    bits = np.uint16(min(min(line_0, line_1), min(line_2, line_3)) + base)
                    bits = np.uint16(0) if m == np.uint16(0) else bits
                    flat[target + np.uint64(k)] = np.uint16(bits | np.uint16(code & np.uint16(0x8000)))
                source += size
                target += size
    return -1, touched
