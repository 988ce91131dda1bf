"""Triton kernels of `SparseAttention`: attention over a list of shared K = V rows, and the merge of key splits.

Logits are kept in base 2 (scaled by log2 e), statistics in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.rounding import cast_to_dtype, dot_operand

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # where the running maximum starts (spec 5.6)


@triton.jit
def _attend_rows(
    query,
    rows,
    valid,
    head_dim,
    scale,
    maximum,
    denominator,
    total,
    BLOCK_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Fold BLOCK_KEYS rows, whose first elements `rows` points to, into the running softmax of every head."""
    feature = tl.arange(0, BLOCK_DIM)
    # Masked, not only weighted by zero: a slot never written may hold NaN.
    mask = valid[:, None] if WHOLE else valid[:, None] & (feature < head_dim)[None, :]
    keys = tl.load(rows[:, None] + feature[None, :], mask=mask, other=0.0)
    operand = dot_operand(keys, INTERPRET)
    logits = tl.dot(query, tl.trans(operand), input_precision=PRECISION) * scale
    logits = tl.where(valid[None, :], logits, LOWEST)
    higher = tl.maximum(maximum, tl.max(logits, axis=1))
    decay = tl.exp2(maximum - higher)
    weights = tl.where(valid[None, :], tl.exp2(logits - higher[:, None]), 0.0)
    denominator = denominator * decay + tl.sum(weights, axis=1)
    rounded = dot_operand(cast_to_dtype(weights, keys.dtype, INTERPRET), INTERPRET)
    total = tl.dot(rounded, operand, total * decay[:, None], input_precision=PRECISION)
    return higher, denominator, total


@triton.jit(
    do_not_specialize=[
        "tokens",
        "heads",
        "dim_units",
        "ring",
        "entries",
        "window_size",
        "index_topk",
        "blocks_per_split",
    ]
)
def sparse_attention_kernel(
    q,
    window_kv,
    start_positions,
    attn_sink,
    compressed_kv,
    topk_indices,
    attention_output,
    partial_maximum,
    partial_denominator,
    partial_total,
    tokens,
    heads,
    dim_units,
    ring,
    entries,
    window_size,
    index_topk,
    blocks_per_split,
    softmax_scale,
    UNIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One token, BLOCK_HEADS heads, one split of its key list: window rows first, then selected rows."""
    token = tl.program_id(0).to(tl.int64)
    batch = token // tokens
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(2)
    feature = tl.arange(0, BLOCK_DIM)
    key = tl.arange(0, BLOCK_KEYS)
    # A multiple of UNIT, so that loads can be 16 bytes wide.
    head_dim = BLOCK_DIM if WHOLE else dim_units * UNIT
    scale = softmax_scale * LOG2_E
    head_mask = (head < heads)[:, None] & (feature < head_dim)[None, :]
    place = (token * heads + head)[:, None] * head_dim + feature[None, :]
    query = dot_operand(tl.load(q + place, mask=head_mask, other=0.0), INTERPRET)

    maximum = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    denominator = tl.zeros([BLOCK_HEADS], tl.float32)
    total = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)

    window_blocks = tl.cdiv(window_size, BLOCK_KEYS)
    all_blocks = window_blocks + tl.cdiv(index_topk, BLOCK_KEYS)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, all_blocks)

    position = tl.load(start_positions + batch) + token % tokens
    slot_of_position = (position % ring).to(tl.int32)
    seen = tl.minimum(position + 1, window_size).to(tl.int32)
    window = window_kv + batch * ring * head_dim
    compressed = compressed_kv + batch * entries * head_dim
    for block in range(first, last):
        # Both kinds of block share one loop body, and with it the pipeline's buffers.
        in_window = block < window_blocks
        back = window_size - 1 - (block * BLOCK_KEYS + key)  # oldest first
        slot = slot_of_position - back
        slot = tl.where(slot < 0, slot + ring, slot)
        number = (block - window_blocks) * BLOCK_KEYS + key
        selected = (number >= 0) & (number < index_topk)
        entry = tl.load(topk_indices + token * index_topk + number, mask=selected, other=-1)
        valid = tl.where(in_window, (back >= 0) & (back < seen), (entry >= 0) & (entry < entries))
        row = tl.where(valid, tl.where(in_window, slot, entry), 0).to(tl.int64)
        rows = tl.where(in_window, window, compressed) + row * head_dim
        maximum, denominator, total = _attend_rows(
            query,
            rows,
            valid,
            head_dim,
            scale,
            maximum,
            denominator,
            total,
            BLOCK_DIM,
            WHOLE,
            PRECISION,
            INTERPRET,
        )

    if SPLIT:
        part = (token * tl.num_programs(2) + split) * heads + head
        tl.store(partial_maximum + part, maximum, mask=head < heads)
        tl.store(partial_denominator + part, denominator, mask=head < heads)
        tl.store(partial_total + part[:, None] * head_dim + feature[None, :], total, mask=head_mask)
    else:
        sink = tl.load(attn_sink + head, mask=head < heads, other=0.0)
        denominator += tl.exp2(sink * LOG2_E - maximum)
        result = total / denominator[:, None]
        result = cast_to_dtype(result, attention_output.dtype.element_ty, INTERPRET)
        tl.store(attention_output + place, result, mask=head_mask)


@triton.jit(do_not_specialize=["heads", "dim_units", "splits"])
def merge_splits_kernel(
    partial_maximum,
    partial_denominator,
    partial_total,
    attn_sink,
    attention_output,
    heads,
    dim_units,
    splits,
    UNIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Output of one token and head from the statistics and sums of its splits, added in split order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    feature = tl.arange(0, BLOCK_DIM)
    head_dim = dim_units * UNIT
    used = feature < head_dim
    number = tl.arange(0, BLOCK_SPLITS)
    part = (token * splits + number) * heads + head
    maxima = tl.load(partial_maximum + part, mask=number < splits, other=LOWEST)
    maximum = tl.max(maxima, axis=0)
    parts = tl.load(partial_denominator + part, mask=number < splits, other=0.0)
    denominator = tl.sum(parts * tl.exp2(maxima - maximum), axis=0)
    denominator += tl.exp2(tl.load(attn_sink + head) * LOG2_E - maximum)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(splits):
        place = (token * splits + split) * heads + head
        weight = tl.exp2(tl.load(partial_maximum + place) - maximum)
        total += weight * tl.load(partial_total + place * head_dim + feature, mask=used, other=0.0)
    result = cast_to_dtype(total / denominator, attention_output.dtype.element_ty, INTERPRET)
    tl.store(attention_output + (token * heads + head) * head_dim + feature, result, mask=used)
