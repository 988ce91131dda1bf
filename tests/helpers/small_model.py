"""A small random model in memory: every kind of layer, float weights, quick enough for property tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.inventory import checkpoint_tensors
from engram_trt.configs.limits import Limits
from engram_trt.configs.model import ModelConfig
from engram_trt.export.torch_runner import torch_engine
from engram_trt.runtime.engine import Engine

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "dim": 32,
    "moe_inter_dim": 32,
    "n_layers": 7,
    "n_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_activated_experts": 2,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 32,
    "head_dim": 32,
    "rope_head_dim": 16,
    "norm_eps": 1e-20,
    "o_groups": 2,
    "o_lora_rank": 16,
    "window_size": 5,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1],
    "kv_source_layers": [2, 4],
    "index_source_layers": [2, 4, 6],
    "compress_rope_theta": 160000.0,
    "original_seq_len": 32,
    "rope_theta": 10000.0,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 60,
    "vision_n_layers": 1,
    "vision_dim": 32,
    "vision_n_heads": 2,
    "vision_inter_dim": 32,
    "vision_patch_size": 2,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 16,
    "vision_min_pixels": 16,
    "vision_max_wh_ratio": None,
    "image_token_id": 90,
    "dtype": "fp8",
    "expert_dtype": "fp4",
}


def small_config(**changes: Any) -> ModelConfig:
    """The small model's config, with changes; table rows follow from the primes."""
    values = {**SMALL, **changes}
    if values["engram_layer_ids"]:
        layout = EngramLayout.derive(
            values["engram_layer_ids"],
            values["engram_vocab_size"],
            values["engram_max_ngram_size"],
            values["engram_n_heads"],
            values["engram_compressed_vocab_size"],
        )
        values["engram_num_embeddings"] = list(layout.num_embeddings)
    return ModelConfig.from_dict(values)


def small_token_map(config: ModelConfig) -> Tensor:
    """A token map that merges some ids; the pad keeps a class that is not its raw id."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, config.engram_compressed_vocab_size, (config.vocab_size,), generator=generator)


@dataclass
class RandomSource:
    """Random float weights under the checkpoint's names; a wide spread of selection scores, no ties."""

    config: ModelConfig
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        for name, entry in checkpoint_tensors(self.config).items():
            if name.endswith(".scale") and ".engram.embed" not in name:
                continue
            self.tensors[name] = _random_tensor(name, entry.dtype, entry.shape, random)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def _random_tensor(name: str, dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    if dtype == "F8_E8M0":
        return torch.from_numpy(random.integers(124, 129, shape).astype(np.uint8)).view(torch.float8_e8m0fnu)
    if ".engram.embed" in name:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32)).to(torch.float8_e4m3fn)
    if dtype == "I8":
        shape = (*shape[:-1], shape[-1] * 2)
    values = random.standard_normal(shape).astype(np.float32)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        values = 1 + 0.1 * values
    elif len(shape) > 1 and name != "embed.weight":
        values /= np.sqrt(shape[-1])
    return torch.from_numpy(values)


LIMITS = Limits(max_batch=3, max_step_tokens=12, max_context=64, max_rollback=5)


def small_engine(config: ModelConfig | None = None, limits: Limits = LIMITS, **deployment: Any) -> Engine:
    """The small model, eager."""
    config = config or small_config()
    choices = replace(DeploymentConfig(limits=limits), **deployment)
    token_map = small_token_map(config) if config.has_engram else None
    return torch_engine(RandomSource(config), choices, token_map)
