"""Reference of `SparseAttention`."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.primitives import gather_rows, ring_slots

MASKED = -1e30
"""Score of a row that is not there: far below any real one, but finite, so that no difference is NaN."""


def window_positions(start_positions: Tensor, tokens: int, window_size: int) -> Tensor:
    """Positions each token sees through the window, oldest first; negative before the sequence begins.

    Args:
        start_positions: [batch] int64.
        tokens: tokens in the step.
        window_size: positions seen, the token's own included.

    Returns:
        [batch, tokens, window_size] int64.
    """
    positions = start_positions.unsqueeze(1) + torch.arange(tokens, device=start_positions.device)
    back = torch.arange(window_size, device=start_positions.device) - (window_size - 1)
    return positions.unsqueeze(-1) + back


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
    listed = window_positions(start_positions, q.shape[1], window_size)
    rows = gather_rows(window_kv, ring_slots(listed, window_kv))
    if compressed_kv is not None and topk_indices is not None:
        entries = topk_indices.to(torch.int64)
        rows = torch.cat([rows, gather_rows(compressed_kv, entries.clamp(min=0))], dim=2)
        listed = torch.cat([listed, entries], dim=2)
    return attend(q, rows, listed >= 0, attn_sink, softmax_scale)


def attend(q: Tensor, rows: Tensor, valid: Tensor, attn_sink: Tensor, softmax_scale: float) -> Tensor:
    """Softmax over gathered rows, with a sink in the denominator only.

    Statistics are float32 whatever the dtype; probabilities are rounded to the rows' dtype before the product.
    A token that attends to nothing gets zeros.

    Args:
        q: [batch, tokens, heads, head_dim].
        rows: [batch, tokens, k, head_dim], K = V.
        valid: [batch, tokens, k] bool.
        attn_sink: [heads] float32.
        softmax_scale: factor of q.k.

    Returns:
        [batch, tokens, heads, head_dim] in q's dtype.
    """
    # A slot never written may hold NaN, and 0 * NaN would reach the sum: blank the row, do not only mask it.
    rows = torch.where(valid.unsqueeze(-1), rows, 0)
    scores = torch.matmul(q.to(torch.float32), rows.to(torch.float32).transpose(2, 3)) * softmax_scale
    scores = torch.where(valid.unsqueeze(2), scores, MASKED)
    sink = attn_sink.reshape(-1, 1)
    maximum = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    probabilities = torch.exp(scores - maximum)
    denominator = probabilities.sum(dim=-1, keepdim=True) + torch.exp(sink - maximum)
    weighted = torch.matmul(probabilities.to(rows.dtype).to(torch.float32), rows.to(torch.float32))
    return (weighted / denominator).to(q.dtype)
