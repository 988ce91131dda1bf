"""Reference of `MoEExpertOutputs`."""

from __future__ import annotations

from torch import Tensor

from engram_trt.plugins.moe_experts.reference import outputs_by_expert


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
    """Outputs of the experts that the caller chose; only those are read.

    Args:
        ffn_in: [rows, dim].
        expert_ids: [rows, activated] int32, index into the bound experts; -1 where a token has no expert here.
        expert_weights: [rows, activated] float32 routing weights.
        experts_w1, experts_w3: [experts, inter, dim] float, or [experts, inter, dim/2] int8 packed.
        experts_w2: [experts, dim, inter] float, or [experts, dim, inter/2] int8 packed.
        experts_w1_scale, experts_w2_scale, experts_w3_scale: E8M0 bytes of packed weights, else None.
        swiglu_limit, activation_format: as in the contract.

    Returns:
        [rows, activated, dim] in ffn_in's dtype; zeros where the id is -1.

    Raises:
        IndexError: an id is not below the number of bound experts.
    """
    experts, scales = (experts_w1, experts_w2, experts_w3), (experts_w1_scale, experts_w2_scale, experts_w3_scale)
    outputs = ffn_in.new_zeros((*expert_ids.shape, ffn_in.shape[-1]))
    for rows, slots, output in outputs_by_expert(
        ffn_in, expert_ids, expert_weights, experts, scales, swiglu_limit, activation_format
    ):
        outputs[rows, slots] = output
    return outputs
