"""Reference of `CacheWrite`."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.cache_write.spec import RING


def cache_write_(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    """Write in place, as an engine does, and return the cache itself.

    Args:
        cache: [batch, capacity, width].
        update: [batch, rows, width], rows <= capacity.
        write_positions: [batch] int64, position of the first row.
        mode: 0 append, 1 ring.

    Returns:
        `cache`.
    """
    batch, capacity, _ = cache.shape
    slots = write_positions.unsqueeze(1) + torch.arange(update.shape[1], device=cache.device)
    if mode == RING:
        slots = torch.remainder(slots, capacity)
    cache[torch.arange(batch, device=cache.device).unsqueeze(1), slots] = update.to(cache.dtype)
    return cache


def cache_write(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    """The same without touching `cache`: what the graph's node means."""
    return cache_write_(cache.clone(), update, write_positions, mode)
