"""`torch.ops.engram.moe_expert_outputs`: the reference, opaque to a trace (its loop depends on the data)."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.kernels.dispatch import launch_on_cuda
from engram_trt.plugins.moe_expert_outputs import reference
from engram_trt.plugins.moe_expert_outputs.spec import SPEC


@torch.library.custom_op("engram::moe_expert_outputs", mutates_args=())
def moe_expert_outputs(
    ffn_in: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts_w1: Tensor,
    experts_w2: Tensor,
    experts_w3: Tensor,
    experts_w1_scale: Tensor | None,
    experts_w2_scale: Tensor | None,
    experts_w3_scale: Tensor | None,
    swiglu_limit: float,
    activation_format: int,
) -> Tensor:
    """See `reference.moe_expert_outputs`."""
    routed = (ffn_in, expert_ids, expert_weights)
    weights = (experts_w1, experts_w2, experts_w3)
    scales = (experts_w1_scale, experts_w2_scale, experts_w3_scale)
    if ffn_in.is_cuda:
        return launch_on_cuda(SPEC, (*routed, *weights, *scales), (swiglu_limit, activation_format))[0]
    return reference.moe_expert_outputs(*routed, *weights, *scales, swiglu_limit, activation_format)


@moe_expert_outputs.register_fake
def _(
    ffn_in: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts_w1: Tensor,
    experts_w2: Tensor,
    experts_w3: Tensor,
    experts_w1_scale: Tensor | None,
    experts_w2_scale: Tensor | None,
    experts_w3_scale: Tensor | None,
    swiglu_limit: float,
    activation_format: int,
) -> Tensor:
    return ffn_in.new_empty((*expert_ids.shape, ffn_in.shape[-1]))
