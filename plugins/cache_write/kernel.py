"""Triton kernel of `CacheWrite`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "rows_per_batch", "capacity", "width_units"])
def cache_write_kernel(
    cache,
    update,
    write_positions,
    num_rows,
    rows_per_batch,
    capacity,
    width_units,
    UNIT: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Copy rows [num_rows, width] into cache [batch, capacity, width]; a row outside the cache is dropped."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    batch = row // rows_per_batch
    slot = tl.load(write_positions + batch, mask=live, other=0) + row % rows_per_batch
    size = tl.full([BLOCK_ROWS], 0, tl.int64) + capacity
    if MODE == 1:
        slot = slot % size
        slot = tl.where(slot < 0, slot + size, slot)
    live = live & (slot >= 0) & (slot < size)
    width = width_units.to(tl.int64) * UNIT  # a multiple of UNIT, so that loads can be 16 bytes wide
    source = update + row.to(tl.int64)[:, None] * width
    target = cache + (batch.to(tl.int64) * size + slot)[:, None] * width
    for start in range(0, width_units * UNIT, BLOCK_WORDS):
        column = start + tl.arange(0, BLOCK_WORDS)
        mask = live[:, None] & (column < width_units * UNIT)[None, :]
        tl.store(target + column[None, :], tl.load(source + column[None, :], mask=mask), mask=mask)
