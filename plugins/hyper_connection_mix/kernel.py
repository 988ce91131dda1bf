"""Triton kernels of `HyperConnectionMix` (spec 4). All arithmetic is float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "hc_mixes", "dim_units"])
def hyper_connection_project_kernel(
    hidden_states,
    hc_fn,
    sums,
    squares,
    num_tokens,
    hc_mixes,
    dim_units,
    UNIT: tl.constexpr,
    SLICE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_MIXES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Sums over one slice of the flat streams: sums [tokens, slices, BLOCK_MIXES], squares [tokens, slices]."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    part = tl.program_id(1)
    slices = tl.num_programs(1)
    live = token < num_tokens
    mix = tl.arange(0, BLOCK_MIXES)
    hc_dim = dim_units * UNIT  # a multiple of UNIT, so that loads can be 16 bytes wide
    first = part * SLICE_DIM
    last = tl.minimum(first + SLICE_DIM, hc_dim)
    row = hidden_states + token.to(tl.int64)[:, None] * hc_dim
    weights = hc_fn + mix[:, None] * hc_dim
    total = tl.zeros([BLOCK_TOKENS, BLOCK_MIXES], tl.float32)
    square = tl.zeros([BLOCK_TOKENS], tl.float32)
    for start in range(first, last, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)
        used = (column < hc_dim)[None, :]
        x = tl.load(row + column[None, :], mask=live[:, None] & used, other=0.0).to(tl.float32)
        w = tl.load(weights + column[None, :], mask=(mix < hc_mixes)[:, None] & used, other=0.0)
        # Three tf32 products keep float32's accuracy on the tensor cores.
        total = tl.dot(x, tl.trans(w), total, input_precision="tf32x3")
        square += tl.sum(x * x, axis=1)
    place = token.to(tl.int64) * slices + part
    tl.store(sums + place[:, None] * BLOCK_MIXES + mix[None, :], total, mask=live[:, None])
    tl.store(squares + place, square, mask=live)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_tokens", "hc_mult", "slices", "iterations"])
def hyper_connection_mix_kernel(
    sums,
    squares,
    hc_scale,
    hc_base,
    pre,
    post,
    comb,
    num_tokens,
    hc_mult,
    slices,
    hc_dim,
    iterations,
    hc_eps,
    norm_eps,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_MIXES: tl.constexpr,
    BLOCK_STREAMS: tl.constexpr,
):
    """pre, post and comb of BLOCK_TOKENS tokens from the sums of all slices, added in slice order."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = token < num_tokens
    stream = tl.arange(0, BLOCK_STREAMS)
    used = stream < hc_mult
    pair = (stream * hc_mult)[:, None] + stream[None, :]
    pair_used = used[:, None] & used[None, :]
    mask = live[:, None] & used[None, :]
    pair_mask = live[:, None, None] & pair_used[None, :, :]

    square = tl.zeros([BLOCK_TOKENS], tl.float32)
    pre_mix = tl.zeros([BLOCK_TOKENS, BLOCK_STREAMS], tl.float32)
    post_mix = tl.zeros([BLOCK_TOKENS, BLOCK_STREAMS], tl.float32)
    comb_mix = tl.zeros([BLOCK_TOKENS, BLOCK_STREAMS, BLOCK_STREAMS], tl.float32)
    for part in range(slices):
        place = token.to(tl.int64) * slices + part
        square += tl.load(squares + place, mask=live, other=0.0)
        row = sums + place * BLOCK_MIXES
        pre_mix += tl.load(row[:, None] + stream[None, :], mask=mask, other=0.0)
        post_mix += tl.load(row[:, None] + hc_mult + stream[None, :], mask=mask, other=0.0)
        comb_mix += tl.load(row[:, None, None] + 2 * hc_mult + pair[None, :, :], mask=pair_mask, other=0.0)
    factor = tl.rsqrt(square / hc_dim + norm_eps)

    base = tl.load(hc_base + stream, mask=used, other=0.0)
    weights = pre_mix * factor[:, None] * tl.load(hc_scale) + base[None, :]
    out = token.to(tl.int64)[:, None] * hc_mult + stream[None, :]
    tl.store(pre + out, _sigmoid(weights) + hc_eps, mask=mask)
    base = tl.load(hc_base + hc_mult + stream, mask=used, other=0.0)
    weights = post_mix * factor[:, None] * tl.load(hc_scale + 1) + base[None, :]
    tl.store(post + out, 2.0 * _sigmoid(weights), mask=mask)

    base = tl.load(hc_base + 2 * hc_mult + pair, mask=pair_used, other=0.0)
    logits = comb_mix * factor[:, None, None] * tl.load(hc_scale + 2) + base[None, :, :]
    # Streams that do not exist hold zeros, which no sum of the normalisation notices.
    matrix = tl.exp(logits - tl.max(tl.where(pair_used[None, :, :], logits, -1e30), axis=2)[:, :, None])
    matrix = tl.where(pair_used[None, :, :], matrix, 0.0)
    row_sum = tl.where(used[None, :], tl.sum(matrix, axis=2), 1.0)
    matrix = tl.where(pair_used[None, :, :], matrix / row_sum[:, :, None] + hc_eps, 0.0)
    matrix = matrix / (tl.sum(matrix, axis=1) + hc_eps)[:, None, :]
    for _ in range(1, iterations):
        matrix = matrix / (tl.sum(matrix, axis=2) + hc_eps)[:, :, None]
        matrix = matrix / (tl.sum(matrix, axis=1) + hc_eps)[:, None, :]
    target = comb + (token.to(tl.int64) * hc_mult * hc_mult)[:, None, None] + pair[None, :, :]
    tl.store(target, matrix, mask=pair_mask)
