"""`torch.ops.engram.sparse_attention`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.kernels.dispatch import launch_on_cuda
from engram_trt.plugins.sparse_attention import reference
from engram_trt.plugins.sparse_attention.spec import SPEC


@torch.library.custom_op("engram::sparse_attention", mutates_args=())
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
    """See `reference.sparse_attention`."""
    if q.is_cuda:
        tensors = (q, window_kv, start_positions, attn_sink, compressed_kv, topk_indices)
        return launch_on_cuda(SPEC, tensors, (window_size, softmax_scale))[0]
    return reference.sparse_attention(
        q, window_kv, start_positions, attn_sink, compressed_kv, topk_indices, window_size, softmax_scale
    )


@sparse_attention.register_fake
def _(
    q: Tensor,
    window_kv: Tensor,
    start_positions: Tensor,
    attn_sink: Tensor,
    compressed_kv: Tensor | None,
    topk_indices: Tensor | None,
    window_size: int,
    softmax_scale: float,
) -> Tensor:
    return torch.empty_like(q)
