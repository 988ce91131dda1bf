"""Stage `engram_hash`: token ids to rows of every Engram table (`engram_hash_spec`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.layers import parameter
from engram_trt.export.modeling.probe import probe
from engram_trt.plugins.engram_hash.spec import DEAD
from engram_trt.plugins.engram_hash.torch_op import engram_hash
from engram_trt.plugins.primitives import take


class EngramHashStage(nn.Module):
    """Compress token ids, then hash them with their history."""

    def __init__(self, config: ModelConfig, token_map: Tensor | None = None) -> None:
        """Args: config: the model; token_map: [vocab_size] int64, None while only shapes matter."""
        super().__init__()
        layout = EngramLayout.from_config(config)
        self.token_map = parameter(config.vocab_size, dtype=torch.int64)
        self.multipliers = nn.Parameter(torch.tensor(layout.multipliers), requires_grad=False)
        self.primes = nn.Parameter(torch.tensor(layout.primes), requires_grad=False)
        self.offsets = nn.Parameter(torch.tensor(layout.offsets), requires_grad=False)
        self.pad_id = 0
        if token_map is not None:
            self.token_map = nn.Parameter(token_map, requires_grad=False)
            self.pad_id = int(token_map[config.engram_pad_id])
        self.layer_ids = config.engram_layer_ids

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See the spec's table."""
        compressed = take(self.token_map, inputs["token_ids"])
        compressed = torch.where(inputs["image_mask"], DEAD, compressed)
        hashed = engram_hash(
            compressed, inputs["token_history"], self.multipliers, self.primes, self.offsets, self.pad_id
        )
        probe("hash_ids", hashed)
        results = {"compressed_ids": compressed}
        for index, layer_id in enumerate(self.layer_ids):
            results[f"engram_ids_{layer_id}"] = hashed[:, :, index]
        return tuple(results[name] for name in outputs)
