"""Reference of `MoEExperts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def outputs_by_expert(
    ffn_in: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    swiglu_limit: float,
    activation_format: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Outputs of one expert after the other, in ascending id; only those with a token are read.

    All tokens of an expert go through one product per projection, in ascending row: bits may depend on that.

    Args:
        ffn_in: [rows, dim].
        expert_ids: [rows, activated] integer; negative where there is no expert.
        expert_weights: [rows, activated] float32.
        experts: w1, w2, w3 of all experts, as in `moe_experts`.
        scales: of packed experts, in the same order, else None.
        swiglu_limit, activation_format: as in the contract.

    Yields:
        rows [pairs], slots [pairs], outputs [pairs, dim] in ffn_in's dtype.

    Raises:
        IndexError: an id is not below the number of experts.
    """
    for expert_id in torch.unique(expert_ids).tolist():
        if expert_id < 0:
            continue
        w1, w2, w3 = (
            _weight(codes[expert_id], None if scale is None else scale[expert_id], ffn_in.dtype)
            for codes, scale in zip(experts, scales, strict=True)
        )
        rows, slots = torch.where(expert_ids == expert_id)
        routing = expert_weights[rows, slots].unsqueeze(-1)
        yield rows, slots, expert(ffn_in[rows], w1, w2, w3, routing, swiglu_limit, activation_format)


def _weight(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (codes if scale is None else dequantize_fp4(codes, scale)).to(dtype)


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
    total = torch.zeros(ffn_in.shape, dtype=torch.float32, device=ffn_in.device)
    experts, scales = (experts_w1, experts_w2, experts_w3), (experts_w1_scale, experts_w2_scale, experts_w3_scale)
    # Ascending ids: the order of the sum is part of the contract.
    for rows, _, output in outputs_by_expert(ffn_in, chosen, weights, experts, scales, swiglu_limit, activation_format):
        total.index_add_(0, rows, output.to(torch.float32))
    return total
