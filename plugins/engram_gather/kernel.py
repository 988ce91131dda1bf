"""Triton kernels of `EngramGather`. Row addresses are 64-bit throughout: a released table is 98 GB."""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.rounding import cast_to_dtype, decode_e4m3, decode_e8m0


@triton.jit
def _decode_rows(
    rows,
    scales,
    embeddings,
    place,
    live,
    known,
    groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Decode the rows that pointers `rows` and `scales` [BLOCK_ROWS] begin, and store them from `place` on.

    A row that is not `known` lies outside the table and gives zeros.
    """
    BLOCK_GROUPS: tl.constexpr = BLOCK_DIM // GROUP
    feature = tl.arange(0, GROUP)
    for start in range(0, groups, BLOCK_GROUPS):
        group = start + tl.arange(0, BLOCK_GROUPS)
        used = (group < groups)[None, :]
        column = group[None, :, None] * GROUP + feature[None, None, :]
        codes = tl.load(rows[:, None, None] + column, mask=(known[:, None] & used)[:, :, None], other=0)
        exponents = tl.load(scales[:, None] + group[None, :], mask=known[:, None] & used, other=0)
        values = decode_e4m3(codes.to(tl.int32) & 255) * decode_e8m0(exponents.to(tl.int32) & 255)[:, :, None]
        target = embeddings + place[:, None, None] + column
        result = cast_to_dtype(values, embeddings.dtype.element_ty, INTERPRET)
        tl.store(target, result, mask=(live[:, None] & used)[:, :, None])


@triton.jit(do_not_specialize=["num_ids", "table_rows", "groups"])
def engram_gather_kernel(
    engram_ids,
    engram_rows,
    engram_scales,
    embeddings,
    num_ids,
    table_rows,
    groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """embeddings[i] = dequantised row engram_ids[i] of one table, for BLOCK_ROWS values of i."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = index < num_ids
    row = tl.load(engram_ids + index, mask=live, other=0)
    known = live & (row >= 0) & (row < table_rows)
    row = tl.where(known, row, 0)
    width = groups.to(tl.int64)
    _decode_rows(
        engram_rows + row * (width * GROUP),
        engram_scales + row * width,
        embeddings,
        index * (width * GROUP),
        live,
        known,
        groups,
        BLOCK_ROWS,
        BLOCK_DIM,
        GROUP,
        INTERPRET,
    )


@triton.jit(do_not_specialize=["num_ids", "table_rows", "shard_rows", "groups"])
def engram_gather_shards_kernel(
    engram_ids,
    row_addresses,
    scale_addresses,
    embeddings,
    num_ids,
    table_rows,
    shard_rows,
    groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The same from shards of `shard_rows` rows at the given device addresses."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = index < num_ids
    row = tl.load(engram_ids + index, mask=live, other=0)
    known = live & (row >= 0) & (row < table_rows)
    row = tl.where(known, row, 0)
    shard = row // shard_rows
    inside = row % shard_rows
    width = groups.to(tl.int64)
    rows_at = tl.load(row_addresses + shard, mask=known, other=0) + inside * (width * GROUP)
    scales_at = tl.load(scale_addresses + shard, mask=known, other=0) + inside * width
    _decode_rows(
        # Addresses come from memory, so the compiler must be told that rows begin on 16 bytes.
        tl.multiple_of(rows_at.to(tl.pointer_type(tl.int8)), 16),
        scales_at.to(tl.pointer_type(tl.int8)),
        embeddings,
        index * (width * GROUP),
        live,
        known,
        groups,
        BLOCK_ROWS,
        BLOCK_DIM,
        GROUP,
        INTERPRET,
    )
