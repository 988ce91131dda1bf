"""Reference of `SparseAttention`."""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = -1e30
"""Where the running maximum starts, so that a row that attends to nothing gives zeros and not NaN."""


def window_slots(start_positions: Tensor, tokens: int, ring: int, window_size: int) -> Tensor:
    """Ring slot of each position a token sees, oldest first; -1 before the sequence begins.

    Args:
        start_positions: [batch] int64.
        tokens: tokens in the step.
        ring: slots of the ring.
        window_size: positions seen, the token's own included.

    Returns:
        [batch, tokens, window_size] int64.
    """
    positions = start_positions.unsqueeze(1) + torch.arange(tokens, device=start_positions.device)
    back = torch.arange(window_size, device=start_positions.device) - (window_size - 1)
    seen = positions.unsqueeze(-1) + back
    return torch.where(seen >= 0, torch.remainder(seen, torch.full_like(seen, ring)), -1)


def gather_rows(cache: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each batch row's cache; a negative index gives a row of zeros.

    Args:
        cache: [batch, entries, head_dim].
        indices: [batch, tokens, k] integers, -1 for none.

    Returns:
        rows [batch, tokens, k, head_dim] and valid [batch, tokens, k] bool.
    """
    batch, entries, head_dim = cache.shape
    valid = indices >= 0
    base = (torch.arange(batch, device=cache.device) * entries).reshape(batch, 1, 1)
    flat = torch.where(valid, indices, 0).to(torch.int64) + base
    rows = cache.reshape(batch * entries, head_dim).index_select(0, flat.reshape(-1))
    rows = rows.reshape(batch, indices.shape[1], indices.shape[2], head_dim)
    # A slot never written may hold NaN, and 0 * NaN would reach the sum: blank it, do not only mask it.
    return torch.where(valid.unsqueeze(-1), rows, 0), valid


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    start_positions: Tensor,
    attn_sink: Tensor,
    compressed_kv: Tensor | None,
    topk_indices: Tensor | None,
    window_size: int,
    softmax_scale: float,
) -> Tensor:
    """Attention of every head over one list of rows, K = V (spec 5.6).

    Statistics are float32 whatever the dtype; probabilities are rounded to the rows' dtype before the product.

    Args:
        q: [batch, tokens, heads, head_dim].
        window_kv: [batch, ring, head_dim], position p in slot p mod ring.
        start_positions: [batch] int64.
        attn_sink: [heads] float32.
        compressed_kv: [batch, entries, head_dim] or None.
        topk_indices: [batch, tokens, index_topk] int32, -1 for none; or None.
        window_size: positions seen through the window.
        softmax_scale: factor of q.k.

    Returns:
        [batch, tokens, heads, head_dim] in q's dtype.
    """
    slots = window_slots(start_positions, q.shape[1], window_kv.shape[1], window_size)
    rows, valid = gather_rows(window_kv, slots)
    if compressed_kv is not None and topk_indices is not None:
        compressed_rows, compressed_valid = gather_rows(compressed_kv, topk_indices)
        rows = torch.cat([rows, compressed_rows], dim=2)
        valid = torch.cat([valid, compressed_valid], dim=2)
    return attend(q, rows, valid, attn_sink, softmax_scale)


def attend(q: Tensor, rows: Tensor, valid: Tensor, attn_sink: Tensor, softmax_scale: float) -> Tensor:
    """Softmax over gathered rows, with a sink in the denominator only.

    Args:
        q: [batch, tokens, heads, head_dim].
        rows: [batch, tokens, k, head_dim], K = V.
        valid: [batch, tokens, k] bool.
        attn_sink: [heads] float32.
        softmax_scale: factor of q.k.

    Returns:
        [batch, tokens, heads, head_dim] in q's dtype.
    """
    scores = torch.matmul(q.to(torch.float32), rows.to(torch.float32).transpose(2, 3)) * softmax_scale
    mask = valid.unsqueeze(2)
    scores = torch.where(mask, scores, LOWEST)
    maximum = scores.amax(dim=-1, keepdim=True).clamp(min=LOWEST)
    probabilities = torch.where(mask, torch.exp(scores - maximum), 0)
    sink = torch.exp(attn_sink.reshape(1, 1, -1, 1) - maximum)
    denominator = probabilities.sum(dim=-1, keepdim=True) + sink
    weighted = torch.matmul(probabilities.to(rows.dtype).to(torch.float32), rows.to(torch.float32))
    return (weighted / denominator).to(q.dtype)
