"""Stage `head`: streams to logits, at chosen tokens only (`head_spec`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.hyper_connections import collapse
from engram_trt.export.modeling.layers import Linear, RMSNorm
from engram_trt.export.modeling.probe import probe


class HeadStage(nn.Module):
    """Collapse the streams with the last block's mix, normalise, project in float32 (spec 4, "End")."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size, torch.float32)

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See the spec's table."""
        chosen = inputs["logit_positions"]
        streams = select_tokens(inputs["hidden_states"], chosen)
        normed = self.norm(collapse(streams, select_tokens(inputs["pre_mix"], chosen)))
        probe("final_norm", normed)
        logits = F.linear(normed.to(torch.float32), self.head.weight)
        return tuple({"logits": logits}[name] for name in outputs)


def select_tokens(x: Tensor, positions: Tensor) -> Tensor:
    """Chosen tokens of each row: [batch, tokens, ...], int64 [batch, selected] -> [batch, selected, ...]."""
    batch, tokens = x.shape[:2]
    flat = positions + (torch.arange(batch, device=x.device) * tokens).unsqueeze(1)
    chosen = x.flatten(0, 1).index_select(0, flat.reshape(-1))
    return chosen.reshape(batch, positions.shape[1], *x.shape[2:])
