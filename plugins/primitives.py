"""Torch ops that stand for one standard ONNX node each, where torch's own op would export to something else.

`take` is ONNX `Gather` (torch indexing with an int32 tensor exports an invalid GatherND); `stable_topk` is ONNX
`TopK`, whose tie rule (lower index first) torch.topk lacks; `floor_divide` is ONNX `Div` on integers (torch's own
goes through float32, which is wrong above 2^24); `ring_slots` is `Mod` by an extent; `gather_rows` is `GatherND` with a
batch axis, one node where reshapes and offsets would be seven.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("engram::take", mutates_args=())
def take(table: Tensor, indices: Tensor) -> Tensor:
    """table[indices] along axis 0; a negative index counts from the end.

    Args:
        table: [n, ...].
        indices: integers in [-n, n), any shape.

    Returns:
        [*indices.shape, *table.shape[1:]].
    """
    return table[indices.to(torch.int64)]


@take.register_fake
def _(table: Tensor, indices: Tensor) -> Tensor:
    return table.new_empty(*indices.shape, *table.shape[1:])


@torch.library.custom_op("engram::stable_topk", mutates_args=())
def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last axis, largest first; of equal scores the lower index first.

    Args:
        scores: [..., n] with n >= k and no NaN.
        k: how many.

    Returns:
        values [..., k] and indices int64 [..., k].
    """
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k].clone(), indices[..., :k].clone()


@stable_topk.register_fake
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("engram::floor_divide", mutates_args=())
def floor_divide(x: Tensor, divisor: int) -> Tensor:
    """x // divisor for non-negative integers.

    Args:
        x: int64, any shape, >= 0.
        divisor: > 0.

    Returns:
        int64 like x.
    """
    return torch.div(x, divisor, rounding_mode="floor")


@floor_divide.register_fake
def _(x: Tensor, divisor: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("engram::ring_slots", mutates_args=())
def ring_slots(positions: Tensor, ring: Tensor) -> Tensor:
    """positions mod the number of slots, for any sign of position.

    Args:
        positions: int64, any shape.
        ring: [batch, slots, ...]; only its shape is used.

    Returns:
        int64 like positions, in [0, slots).
    """
    return torch.remainder(positions, ring.shape[1])


@ring_slots.register_fake
def _(positions: Tensor, ring: Tensor) -> Tensor:
    return torch.empty_like(positions)


@torch.library.custom_op("engram::gather_rows", mutates_args=())
def gather_rows(cache: Tensor, indices: Tensor) -> Tensor:
    """Rows of each batch row's own cache.

    Args:
        cache: [batch, entries, width].
        indices: [batch, tokens, k] int64 in [0, entries).

    Returns:
        [batch, tokens, k, width].
    """
    batch = torch.arange(cache.shape[0], device=cache.device).reshape(-1, 1, 1)
    return cache[batch, indices]


@gather_rows.register_fake
def _(cache: Tensor, indices: Tensor) -> Tensor:
    return cache.new_empty(*indices.shape, cache.shape[2])
