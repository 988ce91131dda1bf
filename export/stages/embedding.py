"""Stage `embedding`: token ids to residual streams, and the step's rotary tables.

| input                                     | dtype   | shape                       | filled by                     |
|-------------------------------------------|---------|-----------------------------|-------------------------------|
| token_ids                                 | int64   | batch, tokens               | session                       |
| start_positions                           | int64   | batch                       | session                       |
| image_mask (vision)                       | bool    | batch, tokens               | session                       |
| image_embeddings (vision)                 | stage   | batch, tokens, dim          | session; rows used where True |

| output                                    | dtype   | shape                       | read by                       |
|-------------------------------------------|---------|-----------------------------|-------------------------------|
| hidden_states                             | stage   | batch, tokens, hc_mult, dim | first block                   |
| pre_mix                                   | float32 | batch, tokens, hc_mult      | first block: stream 0         |
| window_rotary_cos, window_rotary_sin      | float32 | batch, tokens, rope         | blocks of ratio 0             |
| compress_rotary_cos, compress_rotary_sin  | float32 | batch, tokens, rope         | all other blocks              |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import parameter
from engram_trt.export.modeling.probe import probe
from engram_trt.export.modeling.rotary import inverse_frequencies, rotary_table

NAME = "embedding"


def rotary_families(config: ModelConfig) -> dict[str, int]:
    """Rotary table families the model's layers use: name -> a compress ratio that selects it."""
    families = {}
    if 0 in config.compress_ratios[: config.n_layers]:
        families["window"] = 0
    compressed = [ratio for ratio in config.compress_ratios[: config.n_layers] if ratio]
    if compressed:
        families["compress"] = compressed[0]
    return families


def embedding_spec(config: ModelConfig, dtype: str) -> StageSpec:
    """The table above for one model and stage dtype ("float32" or "bfloat16")."""
    token = ("batch", "tokens")
    inputs = [
        TensorSpec(name="token_ids", dtype="int64", shape=token, role="step"),
        TensorSpec(name="start_positions", dtype="int64", shape=("batch",), role="step"),
    ]
    if config.has_vision:
        rows = (*token, config.dim)
        inputs.append(TensorSpec(name="image_mask", dtype="bool", shape=token, role="step"))
        inputs.append(TensorSpec(name="image_embeddings", dtype=dtype, shape=rows, role="step"))
    streams = (*token, config.hc_mult, config.dim)
    outputs = [
        TensorSpec(name="hidden_states", dtype=dtype, shape=streams, role="activation"),
        TensorSpec(name="pre_mix", dtype="float32", shape=(*token, config.hc_mult), role="activation"),
    ]
    for family in rotary_families(config):
        for part in ("cos", "sin"):
            name, shape = f"{family}_rotary_{part}", (*token, config.rope_head_dim)
            outputs.append(TensorSpec(name=name, dtype="float32", shape=shape, role="activation"))
    return StageSpec(name=NAME, kind=NAME, inputs=tuple(inputs), outputs=tuple(outputs))


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
        """See the module's table."""
        token_ids, start = inputs["token_ids"], inputs["start_positions"]
        batch, tokens = token_ids.shape
        rows = self.embed.weight.index_select(0, token_ids.reshape(-1)).reshape(batch, tokens, -1)
        probe("embed", rows)
        if "image_mask" in inputs:
            rows = torch.where(inputs["image_mask"].unsqueeze(-1), inputs["image_embeddings"], rows)
        streams = rows.unsqueeze(2).expand(batch, tokens, self.config.hc_mult, self.config.dim)
        first = torch.zeros(self.config.hc_mult, device=rows.device)
        first[0] = 1
        results = {
            "hidden_states": streams.contiguous(),
            "pre_mix": first.expand(batch, tokens, self.config.hc_mult).contiguous(),
        }
        positions = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
        for family in self.families:
            cos, sin = rotary_table(positions, getattr(self, f"{family}_frequencies"))
            results[f"{family}_rotary_cos"], results[f"{family}_rotary_sin"] = cos, sin
        return tuple(results[name] for name in outputs)
