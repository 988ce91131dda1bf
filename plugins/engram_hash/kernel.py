"""Triton kernel of `EngramHash`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "history", "heads", "pad_id"])
def engram_hash_kernel(
    compressed_ids,
    token_history,
    multipliers,
    primes,
    offsets,
    hash_ids,
    num_tokens,
    tokens_per_batch,
    history,
    heads,
    pad_id,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Rows of one Engram layer for `BLOCK_TOKENS` tokens (spec 2.4), in int64 from end to end."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    layer = tl.program_id(1)
    layers = tl.num_programs(1)
    live = token < num_tokens
    batch = token // tokens_per_batch
    position = token % tokens_per_batch
    head = tl.arange(0, BLOCK_HEADS)
    columns = history * heads
    factors = multipliers + layer * (history + 1)

    current = tl.load(compressed_ids + token, mask=live, other=-1)
    blocked = current < 0
    rolling = tl.where(blocked, pad_id, current) * tl.load(factors)
    for shift in range(1, history + 1):
        source = position - shift
        inside = source >= 0
        new = tl.load(compressed_ids + token - shift, mask=live & inside, other=-1)
        old = tl.load(token_history + batch * history + (history + source), mask=live & (source < 0), other=-1)
        earlier = tl.where(inside, new, old)
        blocked = blocked | (earlier < 0)
        rolling = rolling ^ (tl.where(blocked, pad_id, earlier) * tl.load(factors + shift))
        for start in range(0, heads, BLOCK_HEADS):
            used = start + head < heads
            column = (shift - 1) * heads + start + head
            prime = tl.load(primes + layer * columns + column, mask=used, other=1)
            offset = tl.load(offsets + layer * columns + column, mask=used, other=0)
            row = rolling[:, None] % prime[None, :] + offset[None, :]
            target = (token.to(tl.int64)[:, None] * layers + layer) * columns + column[None, :]
            tl.store(hash_ids + target, row, mask=live[:, None] & used[None, :])
