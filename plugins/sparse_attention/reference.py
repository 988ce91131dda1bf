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
    queries = q.to(torch.float32)
    rows = gather_rows(window_kv, ring_slots(listed.clamp(min=0), window_kv)).to(torch.float32)
    scores = masked_scores(queries, rows, listed >= 0, softmax_scale)
    if compressed_kv is None or topk_indices is None:
        probabilities, denominator = softmax_with_sink(scores, attn_sink, q.dtype)
        return (weighted_sum(probabilities, rows, listed) / denominator).to(q.dtype)
    entries = topk_indices.to(torch.int64)
    selected = torch.where(entries >= 0, entries, entries.amax(dim=-1, keepdim=True).clamp(min=0))
    selected_rows = gather_rows(compressed_kv, selected).to(torch.float32)
    selected_scores = masked_scores(queries, selected_rows, entries >= 0, softmax_scale)
    probabilities, denominator = softmax_with_sink(torch.cat([scores, selected_scores], dim=-1), attn_sink, q.dtype)
    near, far = torch.split(probabilities, [window_size, entries.shape[-1]], dim=-1)
    total = weighted_sum(near, rows, listed) + weighted_sum(far, selected_rows, entries)
    return (total / denominator).to(q.dtype)


def weighted_sum(probabilities: Tensor, rows: Tensor, listed: Tensor) -> Tensor:
    """Rows times their probabilities; zeros for a token whose list is empty.

    A slot never written may hold NaN, and 0 * NaN would reach the sum. To blank gathered rows is dear: so in place
    of what is not there callers gather a row of the same list that is there, with probability zero (position 0 is in
    every window that begins before it), and only what came of a list with no row at all is blanked, here.

    Args:
        probabilities: [batch, tokens, heads, k] float32, zero where nothing is listed.
        rows: [batch, tokens, k, head_dim] float32.
        listed: [batch, tokens, k] positions or entries, negative for none.

    Returns:
        [batch, tokens, heads, head_dim] float32.
    """
    has_any = (listed.amax(dim=-1, keepdim=True) >= 0).unsqueeze(-1)
    return torch.where(has_any, torch.matmul(probabilities, rows), 0)


def masked_scores(queries: Tensor, rows: Tensor, valid: Tensor, softmax_scale: float) -> Tensor:
    """Scaled products of every head with a list of rows, `MASKED` where a row does not count.

    Args:
        queries: [batch, tokens, heads, head_dim] float32.
        rows: [batch, tokens, k, head_dim] float32, K = V.
        valid: [batch, tokens, k] bool.
        softmax_scale: factor of q.k.

    Returns:
        [batch, tokens, heads, k] float32.
    """
    scores = torch.matmul(queries, rows.transpose(2, 3)) * softmax_scale
    return torch.where(valid.unsqueeze(2), scores, MASKED)


def softmax_with_sink(scores: Tensor, attn_sink: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numerators and denominator of a softmax whose sink counts in the denominator only.

    Statistics are float32 whatever the dtype; numerators are rounded to the rows' dtype, as before their product.

    Args:
        scores: [batch, tokens, heads, k] float32.
        attn_sink: [heads] float32.
        dtype: of the rows.

    Returns:
        numerators [batch, tokens, heads, k], denominator [batch, tokens, heads, 1], float32.
    """
    sink = attn_sink.reshape(-1, 1)
    maximum = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    numerators = torch.exp(scores - maximum)
    denominator = numerators.sum(dim=-1, keepdim=True) + torch.exp(sink - maximum)
    return numerators.to(dtype).to(torch.float32), denominator
