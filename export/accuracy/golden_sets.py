"""Choices as sets: lists of entries or blocks whose order or padding is not part of the result."""

from __future__ import annotations

import torch
from torch import Tensor


def as_sets(indices: Tensor, size: int) -> Tensor:
    """Membership of each entry: [..., k] integers, -1 for none -> bool [..., size].

    A repeated or too large index shows in an extra last column, so that it differs from a proper list.
    """
    slots = indices.to(torch.int64)
    slots = torch.where(slots < 0, size, slots.clamp(max=size + 1))
    counts = torch.zeros(*indices.shape[:-1], size + 2, dtype=torch.int64)
    counts.scatter_add_(-1, slots, torch.ones_like(slots))
    odd = (counts[..., :size] > 1).any(-1) | (counts[..., size + 1] > 0)
    return torch.cat([counts[..., :size] > 0, odd.unsqueeze(-1)], dim=-1)


def mask_of_blocks(blocks: Tensor, block_size: int, width: int) -> Tensor:
    """Entries inside listed blocks: [..., k] block ids, -1 for none -> bool [..., width]."""
    num_blocks = -(-width // block_size)
    kept = as_sets(blocks, max(num_blocks, int(blocks.max()) + 1 if blocks.numel() else 0))[..., :-1]
    return kept.repeat_interleave(block_size, dim=-1)[..., :width]


def blocks_of_mask(mask: Tensor, block_size: int, num_listed: int) -> Tensor:
    """The inverse: bool [..., width] -> int32 block ids, ascending then -1.

    Args:
        mask: entries that are kept.
        block_size: entries per block.
        num_listed: columns of the result; 0 for as many as there are blocks.

    Returns:
        [..., num_listed].
    """
    width = mask.shape[-1]
    num_blocks = -(-width // block_size)
    padded = torch.nn.functional.pad(mask, (0, num_blocks * block_size - width))
    kept = padded.reshape(*mask.shape[:-1], num_blocks, block_size).any(-1)
    ids = torch.where(kept, torch.arange(num_blocks), num_blocks)
    ordered = torch.sort(ids, dim=-1).values
    ordered = torch.where(ordered == num_blocks, -1, ordered)
    if num_listed:
        ordered = torch.nn.functional.pad(ordered, (0, max(num_listed - num_blocks, 0)), value=-1)[..., :num_listed]
    return ordered.to(torch.int32)


def sorted_by_index(indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both ordered by ascending index along the last axis: a choice with its weights as a set."""
    order = torch.argsort(indices, dim=-1, stable=True)
    return indices.gather(-1, order), weights.gather(-1, order)
