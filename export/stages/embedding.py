"""Stage `embedding`: token ids to residual streams, and the step's rotary tables (`embedding_spec`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import parameter
from engram_trt.export.modeling.probe import probe
from engram_trt.export.modeling.rotary import inverse_frequencies, rotary_table
from engram_trt.export.stages.rotary_families import rotary_families


class Embedding(nn.Module):
    """The embedding table, under the checkpoint's name."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, dim, dtype=dtype)


class EmbeddingStage(nn.Module):
    """Look up rows, copy them into every stream, start the reading mix on stream 0."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim, compute.dtype)
        self.families = rotary_families(config)
        for family, ratio in self.families.items():
            frequencies = nn.Parameter(inverse_frequencies(config, ratio), requires_grad=False)
            self.register_parameter(f"{family}_frequencies", frequencies)

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See the spec's table."""
        token_ids, start = inputs["token_ids"], inputs["start_positions"]
        batch, tokens = token_ids.shape
        rows = self.embed.weight.index_select(0, token_ids.reshape(-1)).reshape(batch, tokens, -1)
        probe("embed", rows)
        if "image_mask" in inputs:
            rows = torch.where(inputs["image_mask"].unsqueeze(-1), inputs["image_embeddings"], rows)
        streams = rows.unsqueeze(2).expand(batch, tokens, self.config.hc_mult, self.config.dim)
        first = (torch.arange(self.config.hc_mult, device=rows.device) == 0).to(torch.float32)
        results = {
            "hidden_states": streams.contiguous(),
            "pre_mix": first.expand(batch, tokens, self.config.hc_mult).contiguous(),
        }
        positions = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
        for family in self.families:
            cos, sin = rotary_table(positions, getattr(self, f"{family}_frequencies"))
            results[f"{family}_rotary_cos"], results[f"{family}_rotary_sin"] = cos, sin
        return tuple(results[name] for name in outputs)
