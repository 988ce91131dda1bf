"""Rows of a table to bfloat16: in place where compiled code can read them, else from copies."""

from __future__ import annotations

import numpy as np

from engram_trt.runtime.engram.compiled import Convert
from engram_trt.runtime.engram.dequantize import BLOCK_ROWS, Bfloat16Bits, Dequantizer
from engram_trt.runtime.engram.scales import check_scales, scale_error, table_place
from engram_trt.runtime.engram.tables import Ids, Table


def dequantize_rows(table: Table, ids: Ids, out: Bfloat16Bits, loop: Convert | None) -> None:
    """Dequantise rows; the same bits with a compiled loop and without.

    Args:
        table: has them.
        ids: [n] int64, each in the table.
        out: uint16 [n, row_bytes], receives bfloat16 bits.
        loop: the compiled loop, if there is one; `out` is then contiguous.

    Raises:
        CheckpointError: the bytes cannot be had, or a scale is not a number.
    """
    table.prepare(ids)
    located = None if loop is None else table.locate(ids)
    if loop is None or located is None:
        _from_copies(table, ids, out)
        return
    fault = loop(located, out)
    if fault >= 0:
        row, block = divmod(fault, table.shape.scale_bytes)
        raise scale_error(table_place(table.shape), int(ids[row]), block)


def _from_copies(table: Table, ids: Ids, out: Bfloat16Bits) -> None:
    """Block by block with passes of numpy."""
    shape = table.shape
    rows = np.empty((BLOCK_ROWS, shape.row_bytes), dtype=np.uint8)
    scales = np.empty((BLOCK_ROWS, shape.scale_bytes), dtype=np.uint8)
    dequantizer = Dequantizer(shape.row_bytes)
    for start in range(0, ids.shape[0], BLOCK_ROWS):
        block = ids[start : start + BLOCK_ROWS]
        count = block.shape[0]
        table.copy(block, rows[:count], scales[:count])
        check_scales(shape, block, scales[:count])
        dequantizer.convert(rows[:count], scales[:count], out[start : start + count])
