"""Torch ops that stand for one standard ONNX node each, where torch's own op would export to something else.

`take` is ONNX `Gather` (torch indexing with an int32 tensor exports an invalid GatherND); `stable_topk` is ONNX
`TopK`, whose tie rule (lower index first) torch.topk lacks; `floor_divide` is ONNX `Div` on integers (torch's own
goes through float32, which is wrong above 2^24).
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
