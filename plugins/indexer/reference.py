"""Reference of `Indexer`. Ties everywhere: higher score first, then lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER
from engram_trt.plugins.primitives import floor_divide, stable_topk

NEVER = float("-inf")


def visible_counts(start_positions: Tensor, tokens: int, compress_ratio: int) -> Tensor:
    """Entries each token can see: (p+1)//ratio. [batch] -> [batch, tokens] int64."""
    positions = start_positions.unsqueeze(1) + torch.arange(tokens, device=start_positions.device)
    return floor_divide(positions + 1, compress_ratio)


def index_scores(
    index_q: Tensor, index_weights: Tensor, index_keys: Tensor, visible: Tensor, visible_entries: Tensor
) -> Tensor:
    """sum_h w_h * relu(q_h . k_j), -inf where an entry is not visible (spec 5.5).

    Dot products, weighted products and the sum are rounded to the inputs' dtype, as the published model does.
    A NaN score counts as not visible, so that a damaged key is never selected.

    Args:
        index_q: [batch, tokens, index_heads, index_head_dim].
        index_weights: [batch, tokens, index_heads].
        index_keys: [batch, entries, index_head_dim].
        visible: [batch, tokens] int64, entries each token sees.
        visible_entries: [n] int64, the entries to score.

    Returns:
        [batch, tokens, n] float32.
    """
    batch, tokens, heads, width = index_q.shape
    keys = index_keys.index_select(1, visible_entries)
    dots = torch.matmul(index_q.reshape(batch, tokens * heads, width), keys.transpose(1, 2))
    weighted = torch.relu(dots.reshape(batch, tokens, heads, -1)) * index_weights.unsqueeze(-1)
    scores = weighted.sum(dim=2).to(torch.float32)
    seen = torch.logical_and(visible_entries < visible.unsqueeze(-1), ~torch.isnan(scores))
    return torch.where(seen, scores, NEVER)


def select(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest finite scores, ascending, then -1. [..., n] -> int32 [..., k]."""
    filler = torch.full((*scores.shape[:-1], k), NEVER, dtype=scores.dtype, device=scores.device)
    values, indices = stable_topk(torch.cat([scores, filler], dim=-1), k)
    last = torch.iinfo(torch.int32).max
    ordered, _ = torch.sort(torch.where(values == NEVER, last, indices), dim=-1)
    return torch.where(ordered == last, -1, ordered).to(torch.int32)


def candidate_block_scores(scores: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """Largest score of each block; the block with the newest visible entry gets +inf (spec 5.5.1).

    Args:
        scores: [batch, tokens, n].
        visible: [batch, tokens] int64.
        block_size: consecutive entries per block.

    Returns:
        [batch, tokens, ceil(n / block_size)].
    """
    entries = scores.shape[2]
    blocks = (entries + block_size - 1) // block_size
    # Repeating the last entry fills the last block without changing its maximum.
    padded = torch.arange(blocks * block_size, device=scores.device).clamp(max=entries - 1)
    best = torch.unflatten(scores.index_select(2, padded), 2, (-1, block_size)).amax(dim=-1)
    newest = floor_divide((visible - 1).clamp(min=0), block_size)
    newest = torch.where(visible > 0, newest, -1).unsqueeze(-1)
    return torch.where(torch.arange(blocks, device=scores.device) == newest, float("inf"), best)


def inside_candidates(scores: Tensor, candidate_blocks: Tensor, block_size: int) -> Tensor:
    """Scores with every entry outside the candidate blocks set to -inf.

    Args:
        scores: [batch, tokens, n].
        candidate_blocks: [batch, tokens, candidate_topk_blocks] int32, -1 for none.
        block_size: consecutive entries per block.

    Returns:
        [batch, tokens, n].
    """
    batch, tokens, entries = scores.shape
    blocks = (entries + block_size - 1) // block_size
    slot = candidate_blocks.to(torch.int64)
    slot = torch.where(
        torch.logical_and(slot >= 0, slot < blocks), slot, blocks
    )  # one extra slot takes what is not a block
    kept = torch.zeros((batch, tokens, blocks + 1), dtype=torch.int32, device=scores.device)
    kept = kept.scatter(2, slot, torch.ones_like(slot, dtype=torch.int32))
    block_of_entry = floor_divide(torch.arange(entries, device=scores.device), block_size)
    return torch.where(kept.index_select(2, block_of_entry) == 1, scores, NEVER)


def indexer(
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    start_positions: Tensor,
    visible_entries: Tensor,
    candidate_blocks: Tensor | None,
    compress_ratio: int,
    index_topk: int,
    role: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Entries each token attends to and, for a candidate source, the blocks later layers may select from.

    Args:
        index_q: [batch, tokens, index_heads, index_head_dim].
        index_weights: [batch, tokens, index_heads].
        index_keys: [batch, entries, index_head_dim].
        start_positions: [batch] int64.
        visible_entries: [n] int64 = 0..n-1, n >= 1, covering what any token sees.
        candidate_blocks: [batch, tokens, candidate_topk_blocks] int32; only and always for a candidate user.
        compress_ratio, index_topk, role, candidate_topk_blocks, candidate_block_size: as in the contract.

    Returns:
        topk_indices int32 [batch, tokens, index_topk], ascending then -1; candidate_blocks int32 [batch, tokens,
        candidate_topk_blocks] likewise for a candidate source, else None.
    """
    visible = visible_counts(start_positions, index_q.shape[1], compress_ratio)
    scores = index_scores(index_q, index_weights, index_keys, visible, visible_entries)
    if role == CANDIDATE_USER:
        if candidate_blocks is None:
            raise ValueError("Indexer: a candidate user needs candidate_blocks")
        scores = inside_candidates(scores, candidate_blocks, candidate_block_size)
    topk_indices = select(scores, index_topk)
    if role != CANDIDATE_SOURCE:
        return topk_indices, None
    # The published model takes its own top-k from all scores; only later layers are held to the blocks.
    blocks = candidate_block_scores(scores, visible, candidate_block_size)
    return topk_indices, select(blocks, candidate_topk_blocks)
