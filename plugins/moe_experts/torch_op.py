"""`torch.ops.engram.moe_experts`: the reference, opaque to a trace (its loop depends on the data)."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.kernels.dispatch import launch_on_cuda
from engram_trt.plugins.moe_experts import reference
from engram_trt.plugins.moe_experts.spec import SPEC


@torch.library.custom_op("engram::moe_experts", mutates_args=())
def moe_experts(
    ffn_in: Tensor,
    scores: Tensor,
    selection_bias: Tensor,
    experts_w1: Tensor,
    experts_w2: Tensor,
    experts_w3: Tensor,
    experts_w1_scale: Tensor | None,
    experts_w2_scale: Tensor | None,
    experts_w3_scale: Tensor | None,
    n_activated_experts: int,
    norm_topk_prob: int,
    route_scale: float,
    swiglu_limit: float,
    activation_format: int,
) -> Tensor:
    """See `reference.moe_experts`."""
    if ffn_in.is_cuda:
        tensors = (
            ffn_in,
            scores,
            selection_bias,
            experts_w1,
            experts_w2,
            experts_w3,
            experts_w1_scale,
            experts_w2_scale,
            experts_w3_scale,
        )
        attributes = (n_activated_experts, norm_topk_prob, route_scale, swiglu_limit, activation_format)
        return launch_on_cuda(SPEC, tensors, attributes)[0]
    return reference.moe_experts(
        ffn_in,
        scores,
        selection_bias,
        experts_w1,
        experts_w2,
        experts_w3,
        experts_w1_scale,
        experts_w2_scale,
        experts_w3_scale,
        n_activated_experts,
        norm_topk_prob,
        route_scale,
        swiglu_limit,
        activation_format,
    )


@moe_experts.register_fake
def _(
    ffn_in: Tensor,
    scores: Tensor,
    selection_bias: Tensor,
    experts_w1: Tensor,
    experts_w2: Tensor,
    experts_w3: Tensor,
    experts_w1_scale: Tensor | None,
    experts_w2_scale: Tensor | None,
    experts_w3_scale: Tensor | None,
    n_activated_experts: int,
    norm_topk_prob: int,
    route_scale: float,
    swiglu_limit: float,
    activation_format: int,
) -> Tensor:
    return ffn_in.new_empty(ffn_in.shape, dtype=torch.float32)
