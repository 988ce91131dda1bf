"""Reference of `MoEExperts`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engram_trt.plugins.float_tables import E2M1_PAIR_TABLE, E8M0_TABLE
from engram_trt.plugins.moe_experts.spec import GROUP
from engram_trt.plugins.primitives import stable_topk, take
from engram_trt.plugins.quantize_dequantize.reference import quantize_dequantize

WEIGHT_EPS = 1e-20


def dequantize_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Packed E2M1 codes times E8M0 scales (spec 6.3), exact in bfloat16.

    Args:
        codes: [..., inputs/2] int8 or uint8, two codes a byte, low nibble = even input.
        scales: [..., inputs/32] int8 or uint8 view of E8M0 bytes.

    Returns:
        [..., inputs] float32.
    """
    pairs = take(E2M1_PAIR_TABLE.to(codes.device), codes.to(torch.int32))
    factors = take(E8M0_TABLE.to(codes.device), scales.to(torch.int32))
    groups = pairs.flatten(-2).unflatten(-1, (-1, GROUP)) * factors.unsqueeze(-1)
    return groups.flatten(-2)


def choose_experts(
    scores: Tensor, selection_bias: Tensor, n_activated_experts: int, norm_topk_prob: int, route_scale: float
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their routing weights (spec 6.1). Ties: lower expert id.

    Args:
        scores: [rows, experts] float32.
        selection_bias: [rows, experts] float32, used for the choice only.
        n_activated_experts, norm_topk_prob, route_scale: as in the contract.

    Returns:
        expert ids int64 [rows, k] by falling biased score, weights float32 [rows, k].
    """
    _, chosen = stable_topk(scores + selection_bias, n_activated_experts)
    weights = torch.gather(scores, 1, chosen)
    if norm_topk_prob and n_activated_experts > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + WEIGHT_EPS)
    return chosen, weights * route_scale


def swiglu(gate: Tensor, up: Tensor, routing: Tensor | None, swiglu_limit: float) -> Tensor:
    """silu(gate) * up * routing in float32, rounded to the projections' dtype (spec 6.2).

    The gate is clamped from above only, the up projection from both sides. The routing weight multiplies before
    w2, where it changes what w2's input is rounded to.

    Args:
        gate, up: [rows, inter], outputs of w1 and w3.
        routing: [rows, 1] float32, or None for weight one (the shared expert).
        swiglu_limit: 0 for no clamp.

    Returns:
        [rows, inter] in gate's dtype.
    """
    dtype = gate.dtype
    gate, up = gate.to(torch.float32), up.to(torch.float32)
    if swiglu_limit > 0:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    hidden = F.silu(gate) * up
    if routing is not None:
        hidden = hidden * routing
    return hidden.to(dtype)


def expert(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, routing: Tensor, swiglu_limit: float, activation_format: int
) -> Tensor:
    """One routed expert: w2 swiglu(w1 x, w3 x), rounded to x's dtype at each projection.

    Args:
        x: [rows, dim].
        w1, w3: [inter, dim]; w2: [dim, inter]; in x's dtype.
        routing: [rows, 1] float32.
        swiglu_limit: 0 for no clamp.
        activation_format: -1, or a `QuantizeDequantize` format for the inputs of the projections.

    Returns:
        [rows, dim] in x's dtype.
    """
    if activation_format >= 0:
        x = quantize_dequantize(x, activation_format)
    hidden = swiglu(F.linear(x, w1), F.linear(x, w3), routing, swiglu_limit)
    if activation_format >= 0:
        hidden = quantize_dequantize(hidden, activation_format)
    return F.linear(hidden, w2)


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
    """Sum of the chosen experts' outputs; only chosen experts are read.

    Args:
        ffn_in: [rows, dim].
        scores, selection_bias: [rows, experts] float32.
        experts_w1, experts_w3: [experts, inter, dim] float, or [experts, inter, dim/2] int8 packed.
        experts_w2: [experts, dim, inter] float, or [experts, dim, inter/2] int8 packed.
        experts_w1_scale, experts_w2_scale, experts_w3_scale: E8M0 bytes of packed weights, else None.
        n_activated_experts, norm_topk_prob, route_scale, swiglu_limit, activation_format: as in the contract.

    Returns:
        [rows, dim] float32.
    """
    chosen, weights = choose_experts(scores, selection_bias, n_activated_experts, norm_topk_prob, route_scale)

    def weight_of(expert_id: int, codes: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return codes[expert_id].to(ffn_in.dtype)
        return dequantize_fp4(codes[expert_id], scale[expert_id]).to(ffn_in.dtype)

    total = torch.zeros(ffn_in.shape, dtype=torch.float32, device=ffn_in.device)
    for expert_id in torch.unique(chosen).tolist():  # ascending: the order of the sum is part of the contract
        rows, slots = torch.where(chosen == expert_id)
        output = expert(
            ffn_in[rows],
            weight_of(expert_id, experts_w1, experts_w1_scale),
            weight_of(expert_id, experts_w2, experts_w2_scale),
            weight_of(expert_id, experts_w3, experts_w3_scale),
            weights[rows, slots].unsqueeze(-1),
            swiglu_limit,
            activation_format,
        )
        total.index_add_(0, rows, output.to(torch.float32))
    return total
