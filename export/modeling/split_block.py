"""A layer in three parts, so that its routed experts can run on other devices than the rest.

Before the experts: attention and the choice. The experts: one output for each token and chosen expert. After them: the
sum and the shared expert. What a token's experts put out is added in the order of ascending ids, as `MoEExperts` adds
it, so that the three parts give the bits of the whole (spec 6).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.block import AttentionHalf
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.hyper_connections import expand
from engram_trt.export.modeling.moe import EXPERT_SCALES, EXPERT_WEIGHTS, Gate, SharedExpert, routing_of
from engram_trt.export.modeling.probe import probe
from engram_trt.plugins.moe_expert_outputs.torch_op import moe_expert_outputs
from engram_trt.plugins.moe_experts.reference import choose_experts
from engram_trt.plugins.primitives import stable_topk


class ExpertChoice(nn.Module):
    """Which experts a token uses, and how much of each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.gate = config, Gate(config)

    def forward(self, ffn_in: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The choice, in the order of ascending ids.

        Args:
            ffn_in: [batch, tokens, dim].
            image_mask: [batch, tokens] bool, or None.

        Returns:
            expert ids int32 and routing weights float32, both [batch, tokens, n_activated_experts].
        """
        rows = ffn_in.reshape(-1, ffn_in.shape[-1])
        mask = None if image_mask is None else image_mask.reshape(-1)
        scores, selection_bias = self.gate(rows, mask)
        chosen, weights = choose_experts(scores, selection_bias, *routing_of(self.config))
        shape = (*ffn_in.shape[:2], self.config.n_activated_experts)
        probe("gate_idx", chosen.reshape(shape))
        probe("gate_w", weights.reshape(shape))
        # Ids are small: exact in float32, whose order every back end can sort by.
        _, order = stable_topk(-chosen.to(torch.float32), self.config.n_activated_experts)
        ids, weights = torch.gather(chosen, 1, order), torch.gather(weights, 1, order)
        return ids.to(torch.int32).reshape(shape), weights.reshape(shape)


class ChoiceHalf(AttentionHalf):
    """A layer up to the choice of its experts."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> None:
        super().__init__(config, layer, compute)
        self.ffn = ExpertChoice(config)

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """As `Block.forward`; the streams are those after attention."""
        streams, ffn_in, ffn_mix = self.attend(inputs)
        inputs["hidden_states"], inputs["ffn_in"] = streams, ffn_in
        inputs["pre_mix"], inputs["ffn_post"], inputs["ffn_comb"] = ffn_mix
        inputs["expert_ids"], inputs["expert_weights"] = self.ffn(ffn_in, inputs.get("image_mask"))
        probe("pre_mix", inputs["pre_mix"])
        return tuple(inputs[name.removesuffix("_out")] for name in outputs)


class RoutedExperts(nn.Module):
    """The routed experts of a layer, or some of them; all weights are inputs."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config, self.activation_format = config, compute.activation_format

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Run every chosen expert.

        Args:
            inputs: `ffn_in` [batch, tokens, dim]; `expert_ids` int32 and `expert_weights` float32
                [batch, tokens, n_activated_experts], -1 for an expert that is elsewhere; `experts_w1` ...
            outputs: `expert_outputs`.

        Returns:
            [batch, tokens, n_activated_experts, dim].
        """
        ffn_in, ids = inputs["ffn_in"], inputs["expert_ids"]
        activated = self.config.n_activated_experts
        results = moe_expert_outputs(
            ffn_in.reshape(-1, ffn_in.shape[-1]),
            ids.reshape(-1, activated),
            inputs["expert_weights"].reshape(-1, activated),
            *(inputs[name] for name in EXPERT_WEIGHTS),
            *(inputs.get(name) for name in EXPERT_SCALES),
            self.config.swiglu_limit,
            self.activation_format,
        )
        return (results.reshape(*ids.shape, ffn_in.shape[-1]),)


class ExpertSum(nn.Module):
    """Routed outputs and the shared expert."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.shared_experts = SharedExpert(config, compute)

    def forward(self, ffn_in: Tensor, expert_outputs: Tensor) -> Tensor:
        """[batch, tokens, dim], from that and [batch, tokens, n_activated_experts, dim]."""
        routed = torch.zeros_like(ffn_in, dtype=torch.float32)
        for slot in range(expert_outputs.shape[2]):
            routed = routed + expert_outputs[:, :, slot].to(torch.float32)
        return (routed + self.shared_experts(ffn_in).to(torch.float32)).to(ffn_in.dtype)


class SumHalf(nn.Module):
    """A layer behind its routed experts."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.ffn = ExpertSum(config, compute)

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """The streams of the next layer; inputs as `stages/split_block.py` lists them."""
        ffn_out = self.ffn(inputs["ffn_in"], inputs["expert_outputs"])
        streams = expand(ffn_out, inputs["hidden_states"], inputs["ffn_post"], inputs["ffn_comb"])
        probe("ffn_out", ffn_out)
        probe("h", streams)
        return (streams,)
