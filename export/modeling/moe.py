"""Mixture of experts: gate, routed experts (bound from outside) and one shared expert (spec 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import Linear, parameter
from engram_trt.export.modeling.probe import is_probing, probe
from engram_trt.plugins.moe_experts import reference
from engram_trt.plugins.moe_experts.torch_op import moe_experts

EXPERT_WEIGHTS = ("experts_w1", "experts_w2", "experts_w3")
EXPERT_SCALES = ("experts_w1_scale", "experts_w2_scale", "experts_w3_scale")


class Gate(nn.Module):
    """Scores of all experts and the bias that only steers the choice."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.score_func, self.gate_temp = config.score_func, config.gate_temp
        self.weight = parameter(config.n_routed_experts, config.dim)
        self.bias = parameter(config.n_routed_experts)
        if config.has_vision:
            self.bias_vl = parameter(config.n_routed_experts)

    def forward(self, ffn_in: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores and selection bias.

        Args:
            ffn_in: [rows, dim].
            image_mask: [rows] bool, True where `bias_vl` steers; None where the model has no vision.

        Returns:
            scores, selection_bias: [rows, experts] float32.
        """
        logits = F.linear(ffn_in.to(torch.float32), self.weight)
        if self.gate_temp != 1.0:
            logits = logits / self.gate_temp
        scores = self.score(logits)
        if image_mask is None:
            return scores, self.bias.expand(scores.shape)
        return scores, torch.where(image_mask.unsqueeze(-1), self.bias_vl, self.bias)

    def score(self, logits: Tensor) -> Tensor:
        """Apply the configured score function."""
        if self.score_func == "sqrtsoftplus":
            return torch.sqrt(F.softplus(logits))
        if self.score_func == "sigmoid":
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=-1)


def routing_of(config: ModelConfig) -> tuple[int, int, float]:
    """n_activated_experts, norm_topk_prob and route_scale, as the ops take them."""
    return config.n_activated_experts, int(config.norm_topk_prob), config.route_scale


class SharedExpert(nn.Module):
    """The expert every token uses, with weight one and the same clamps."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        inter = config.moe_inter_dim * config.n_shared_experts
        self.swiglu_limit = config.swiglu_limit
        self.w1 = Linear(config.dim, inter, compute.dtype, compute.activation_format)
        self.w2 = Linear(inter, config.dim, compute.dtype, compute.activation_format)
        self.w3 = Linear(config.dim, inter, compute.dtype, compute.activation_format)

    def forward(self, ffn_in: Tensor) -> Tensor:
        """[rows, dim] -> [rows, dim]."""
        gate, up = self.w1(ffn_in), self.w3(ffn_in)
        return self.w2(reference.swiglu(gate, up, None, self.swiglu_limit))


class MoE(nn.Module):
    """Routed plus shared experts. Routed weights are inputs: they stay in the checkpoint."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config, self.activation_format = config, compute.activation_format
        self.gate = Gate(config)
        self.shared_experts = SharedExpert(config, compute)

    def forward(self, ffn_in: Tensor, image_mask: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        """Feed-forward output.

        Args:
            ffn_in: [batch, tokens, dim].
            image_mask: [batch, tokens] bool or None.
            inputs: holds `experts_w1` ... and, when packed, their scales.

        Returns:
            [batch, tokens, dim].
        """
        rows = ffn_in.reshape(-1, ffn_in.shape[-1])
        mask = None if image_mask is None else image_mask.reshape(-1)
        scores, selection_bias = self.gate(rows, mask)
        routing = routing_of(self.config)
        if is_probing():
            chosen, weights = reference.choose_experts(scores, selection_bias, *routing)
            probe("gate_idx", chosen.reshape(*ffn_in.shape[:2], -1))
            probe("gate_w", weights.reshape(*ffn_in.shape[:2], -1))
        routed = moe_experts(
            rows,
            scores,
            selection_bias,
            *(inputs[name] for name in EXPERT_WEIGHTS),
            *(inputs.get(name) for name in EXPERT_SCALES),
            *routing,
            self.config.swiglu_limit,
            self.activation_format,
        )
        total = routed + self.shared_experts(rows).to(torch.float32)
        return total.to(ffn_in.dtype).reshape(ffn_in.shape)
