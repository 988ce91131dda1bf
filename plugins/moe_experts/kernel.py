"""Triton kernels of `MoEExperts` (spec 6.1, 6.2): choose, group by expert, two grouped products, sum.

A token's bits do not depend on its batch mates: every product walks its inputs in one order with one tile shape,
and a token's expert outputs are added in ascending expert id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.fp4_unpacking import LARGEST_EXPONENT, SUM_FACTOR, UNPACK_FP4_ASM
from engram_trt.plugins.kernels.rounding import (
    cast_to_dtype,
    decode_e2m1,
    decode_e8m0,
    dot_operand,
    quantize_dequantize_groups,
    round_to_dtype,
)

WEIGHT_EPS = tl.constexpr(1e-20)
NOT_CHOSEN = tl.constexpr(-2147483648)


@triton.jit
def _ordered_key(x):
    """int32 that orders as float32 x does; NaN below every number, -0 equal to +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, -2147483647)


@triton.jit
def _choose(
    row,
    scores,
    selection_bias,
    chosen,
    routing,
    experts,
    activated,
    norm_topk_prob,
    route_scale,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Experts of one row in ascending id, with their routing weights."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    exists = expert < experts
    place = row * experts + expert
    score = tl.load(scores + place, mask=exists, other=0.0)
    bias = tl.load(selection_bias + place, mask=exists, other=0.0)
    key = tl.where(exists, _ordered_key(score + bias), NOT_CHOSEN)
    taken = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for _ in range(activated):
        best = tl.max(key, axis=0)
        first = tl.min(tl.where(key == best, expert, BLOCK_EXPERTS), axis=0)  # ties: lower id
        taken = tl.where(expert == first, 1, taken)
        key = tl.where(expert == first, NOT_CHOSEN, key)
    weight = tl.where(taken == 1, score, 0.0)
    if (norm_topk_prob != 0) & (activated > 1):
        weight = weight / (tl.sum(weight, axis=0) + WEIGHT_EPS)
    slot = row * activated + tl.cumsum(taken, axis=0) - 1
    tl.store(chosen + slot, expert, mask=taken == 1)
    tl.store(routing + slot, weight * route_scale, mask=taken == 1)


@triton.jit
def prepare_row(
    row,
    block,
    ffn_in,
    activations,
    dim,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Quantise a part of one row; for packed weights put its even columns before its odd ones."""
    GROUPS: tl.constexpr = BLOCK_DIM // GROUP
    column = block * BLOCK_DIM + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < dim
    x = tl.load(ffn_in + row * dim + column, mask=mask, other=0.0).to(tl.float32)
    if FORMAT >= 0:
        x = quantize_dequantize_groups(x, FORMAT)
    PERMUTED: tl.constexpr = activations.dtype.element_ty == tl.bfloat16
    place = _plane_column(column, dim // 2, PERMUTED) if PACKED else column
    tl.store(activations + row * dim + place, cast_to_dtype(x, activations.dtype.element_ty, INTERPRET), mask=mask)


@triton.jit(do_not_specialize=["dim", "experts", "activated", "norm_topk_prob"])
def choose_experts_kernel(
    ffn_in,
    scores,
    selection_bias,
    activations,
    chosen,
    routing,
    dim,
    experts,
    activated,
    norm_topk_prob,
    route_scale,
    PREPARE: tl.constexpr,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The first program of a row chooses its experts, the others prepare its activations."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _choose(
            row,
            scores,
            selection_bias,
            chosen,
            routing,
            experts,
            activated,
            norm_topk_prob,
            route_scale,
            BLOCK_EXPERTS,
        )
    elif PREPARE:
        prepare_row(
            row,
            tl.program_id(1) - 1,
            ffn_in,
            activations,
            dim,
            PACKED,
            FORMAT,
            GROUP,
            BLOCK_DIM,
            INTERPRET,
        )


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def group_by_expert_kernel(
    chosen,
    sorted_pairs,
    tile_expert,
    tile_first,
    tile_last,
    num_pairs,
    max_tiles,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program an expert: its (token, slot) pairs in token order, and its tiles of BLOCK_TOKENS pairs.

    A pair whose id is none of a program's is in no tile.
    """
    mine = tl.program_id(0)
    expert = tl.arange(0, BLOCK_EXPERTS)
    lane = tl.arange(0, BLOCK_PAIRS)
    counts = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for start in range(0, num_pairs, BLOCK_PAIRS):
        inside = start + lane < num_pairs
        ids = tl.load(chosen + start + lane, mask=inside, other=-1)
        counts += tl.histogram(ids, BLOCK_EXPERTS, mask=(ids >= 0) & (ids < tl.num_programs(0)))
    tiles = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first = tl.sum(tl.where(expert < mine, counts, 0), axis=0)
    count = tl.sum(tl.where(expert == mine, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(expert < mine, tiles, 0), axis=0)

    next_place = first
    if count > 0:
        for start in range(0, num_pairs, BLOCK_PAIRS):
            inside = start + lane < num_pairs
            ids = tl.load(chosen + start + lane, mask=inside, other=-1)
            match = (ids == mine).to(tl.int32)
            place = next_place + tl.cumsum(match, axis=0) - 1
            tl.store(sorted_pairs + place, start + lane, mask=match == 1)
            next_place += tl.sum(match, axis=0)
        for tile in range((count + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            begin = first + tile * BLOCK_TOKENS
            tl.store(tile_expert + first_tile + tile, mine)
            tl.store(tile_first + first_tile + tile, begin)
            tl.store(tile_last + first_tile + tile, tl.minimum(begin + BLOCK_TOKENS, first + count))
    if mine == tl.num_programs(0) - 1:
        for tile in range(tl.sum(tiles, axis=0), max_tiles):
            tl.store(tile_expert + tile, -1)


@triton.jit
def _plane_column(column, half, PERMUTED: tl.constexpr):
    """Where an input column lies in a prepared row: even columns first, then odd ones, in the order of `_unpack`."""
    byte = column // 2
    if PERMUTED:
        # In each four bytes the second and third change places.
        byte = (byte & -4) | ((byte & 1) << 1) | ((byte >> 1) & 1)
    return (column % 2) * half + byte


@triton.jit
def _unpacking_factor(byte):
    """bfloat16 factor of a code's bits for an E8M0 byte: 2^(byte-1) / 2^32; NaN for a scale that does not fit."""
    bits = tl.where(byte > LARGEST_EXPONENT, 0x7FC0, (byte + 94) << 7)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _unpack(codes, scales, TARGET: tl.constexpr, INTERPRET: tl.constexpr):
    """Even and odd columns of packed weights: codes [n, k] int8, scales [n, k/16] int8 -> two [n, k] TARGET.

    Values times scales are exact in bfloat16. For bfloat16 the middle two of each four columns are swapped, which
    lets two codes at a time be unpacked in one register, and compiled code leaves a factor to `_finish`. The
    interpreter knows no machine instructions: it decodes code by code.
    """
    n: tl.constexpr = codes.shape[0]
    k: tl.constexpr = codes.shape[1]
    if tl.float32 == TARGET or INTERPRET:
        scale = decode_e8m0(scales.to(tl.int32) & 255)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (n, k // 16, 16)), (n, k))
        word = codes.to(tl.int32)
        even = cast_to_dtype(decode_e2m1(word) * scale, TARGET, INTERPRET)
        odd = cast_to_dtype(decode_e2m1(word >> 4) * scale, TARGET, INTERPRET)
        if tl.bfloat16 == TARGET:
            even = tl.reshape(tl.permute(tl.reshape(even, (n, k // 4, 2, 2)), (0, 1, 3, 2)), (n, k))
            odd = tl.reshape(tl.permute(tl.reshape(odd, (n, k // 4, 2, 2)), (0, 1, 3, 2)), (n, k))
    else:
        factor = _unpacking_factor(scales.to(tl.int32) & 255)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (n, k // 16, 16)), (n, k))
        even, odd = tl.inline_asm_elementwise(
            UNPACK_FP4_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def _finish(total, T: tl.constexpr, PACKED: tl.constexpr, INTERPRET: tl.constexpr):
    """Sums of products with the weights that `_unpack` gives, put to their scale and rounded to T."""
    scaled = total * SUM_FACTOR if PACKED and tl.bfloat16 == T and not INTERPRET else total
    return round_to_dtype(scaled, T, INTERPRET)


@triton.jit
def _add_product(
    total,
    weights,
    scales,
    row,
    row_used,
    inputs,
    input_used,
    start,
    length,
    T: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """total [n, tokens] += weights[row, start:] x inputs^T over BLOCK_K stored weight columns.

    weights: first element of the expert's matrix, [rows, length] as stored; scales likewise, a 16th as wide.
    inputs: pointers [tokens] to the prepared input rows.
    """
    k = start + tl.arange(0, BLOCK_K)
    k_used = k < length
    mask = row_used[:, None] & k_used[None, :]
    stored = tl.load(weights + row.to(tl.int64)[:, None] * length + k[None, :], mask=mask, other=0)
    x_mask = input_used[:, None] & k_used[None, :]
    x = tl.load(inputs[:, None] + k[None, :], mask=x_mask, other=0.0)
    if PACKED:
        group = start // 16 + tl.arange(0, BLOCK_K // 16)
        group_mask = row_used[:, None] & (group < length // 16)[None, :]
        exponents = tl.load(
            scales + row.to(tl.int64)[:, None] * (length // 16) + group[None, :], mask=group_mask, other=0
        )
        even, odd = _unpack(stored, exponents, T, INTERPRET)
        x_odd = tl.load(inputs[:, None] + length + k[None, :], mask=x_mask, other=0.0)
        total = tl.dot(
            dot_operand(even, INTERPRET),
            tl.trans(dot_operand(x, INTERPRET)),
            total,
            input_precision=PRECISION,
        )
        total = tl.dot(
            dot_operand(odd, INTERPRET),
            tl.trans(dot_operand(x_odd, INTERPRET)),
            total,
            input_precision=PRECISION,
        )
    else:
        total = tl.dot(
            dot_operand(stored, INTERPRET),
            tl.trans(dot_operand(x, INTERPRET)),
            total,
            input_precision=PRECISION,
        )
    return total


@triton.jit(do_not_specialize=["dim_units", "inter", "activated"])
def expert_up_kernel(
    activations,
    experts_w1,
    experts_w3,
    experts_w1_scale,
    experts_w3_scale,
    routing,
    sorted_pairs,
    tile_expert,
    tile_first,
    tile_last,
    hidden,
    dim_units,
    inter,
    activated,
    swiglu_limit,
    UNIT: tl.constexpr,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """hidden[place] = silu(w1 x) * w3 x * routing weight, for one tile of pairs and BLOCK_ROWS inner columns."""
    T: tl.constexpr = hidden.dtype.element_ty
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_first + tile) + tl.arange(0, BLOCK_TOKENS)
    live = place < tl.load(tile_last + tile)
    pair = tl.load(sorted_pairs + place, mask=live, other=0)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_used = row < inter
    length = dim_units * UNIT  # stored columns of a weight row, a multiple of UNIT
    dim = length * 2 if PACKED else length
    inputs = activations + (pair // activated).to(tl.int64) * dim
    matrix = expert * inter * length
    gate = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for start in range(0, length, BLOCK_K):
        gate = _add_product(
            gate,
            experts_w1 + matrix,
            experts_w1_scale + matrix // 16,
            row,
            row_used,
            inputs,
            live,
            start,
            length,
            T,
            PACKED,
            BLOCK_K,
            PRECISION,
            INTERPRET,
        )
        up = _add_product(
            up,
            experts_w3 + matrix,
            experts_w3_scale + matrix // 16,
            row,
            row_used,
            inputs,
            live,
            start,
            length,
            T,
            PACKED,
            BLOCK_K,
            PRECISION,
            INTERPRET,
        )
    gate = _finish(gate, T, PACKED, INTERPRET)
    up = _finish(up, T, PACKED, INTERPRET)
    if swiglu_limit > 0:
        gate = tl.minimum(gate, swiglu_limit)
        up = tl.minimum(tl.maximum(up, -swiglu_limit), swiglu_limit)
    weight = tl.load(routing + pair, mask=live, other=0.0)
    value = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    value = tl.trans(round_to_dtype(value, T, INTERPRET))
    if FORMAT >= 0:
        GROUPS: tl.constexpr = BLOCK_TOKENS * BLOCK_ROWS // GROUP
        value = quantize_dequantize_groups(tl.reshape(value, (GROUPS, GROUP)), FORMAT)
        value = tl.reshape(value, (BLOCK_TOKENS, BLOCK_ROWS))
    column = _plane_column(row, inter // 2, tl.bfloat16 == T) if PACKED else row
    target = hidden + place.to(tl.int64)[:, None] * inter + column[None, :]
    tl.store(target, cast_to_dtype(value, T, INTERPRET), mask=live[:, None] & row_used[None, :])


@triton.jit(do_not_specialize=["inter_units", "dim"])
def expert_down_kernel(
    hidden,
    experts_w2,
    experts_w2_scale,
    sorted_pairs,
    tile_expert,
    tile_first,
    tile_last,
    expert_outputs,
    inter_units,
    dim,
    UNIT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """expert_outputs[pair] = w2 hidden[place], for one tile of pairs and BLOCK_ROWS output columns."""
    T: tl.constexpr = hidden.dtype.element_ty
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_first + tile) + tl.arange(0, BLOCK_TOKENS)
    live = place < tl.load(tile_last + tile)
    pair = tl.load(sorted_pairs + place, mask=live, other=0)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_used = row < dim
    length = inter_units * UNIT
    inter = length * 2 if PACKED else length
    inputs = hidden + place.to(tl.int64) * inter
    matrix = expert * dim * length
    total = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for start in range(0, length, BLOCK_K):
        total = _add_product(
            total,
            experts_w2 + matrix,
            experts_w2_scale + matrix // 16,
            row,
            row_used,
            inputs,
            live,
            start,
            length,
            T,
            PACKED,
            BLOCK_K,
            PRECISION,
            INTERPRET,
        )
    target = expert_outputs + pair.to(tl.int64)[:, None] * dim + row[None, :]
    tl.store(
        target,
        cast_to_dtype(tl.trans(_finish(total, T, PACKED, INTERPRET)), T, INTERPRET),
        mask=live[:, None] & row_used[None, :],
    )


@triton.jit(do_not_specialize=["dim", "activated"])
def sum_experts_kernel(
    expert_outputs,
    routed_output,
    dim,
    activated,
    BLOCK_DIM: tl.constexpr,
):
    """routed_output[row] = sum of its experts' outputs in ascending expert id, float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    used = column < dim
    total = tl.zeros([BLOCK_DIM], tl.float32)
    for slot in range(activated):
        place = (row * activated + slot) * dim + column
        total += tl.load(expert_outputs + place, mask=used, other=0.0).to(tl.float32)
    tl.store(routed_output + row * dim + column, total, mask=used)
