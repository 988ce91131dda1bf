"""`ModelConfig`: the facts of a checkpoint, under the field names of the reference's flat config (spec 1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.json_file import read_json_object
from engram_trt.configs.layers import LayerConfig, layer_config
from engram_trt.configs.model_checks import check_model
from engram_trt.configs.model_keys import flat_values, hf_document, is_hf_document, spelled

# What the reference takes at run time; none of it says which model this is.
RUNTIME_KEYS = ("max_batch_size", "max_seq_len", "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model. Every size comes from here; nothing else in the project knows a number of the model.

    Off-switches: `swiglu_limit` 0 (no clamp), `original_seq_len` 0 (no YaRN), `candidate_source_layer` < 0,
    `vision_n_layers` 0, `dspark_block_size` 0, empty `engram_layer_ids`. Keys of a part that is off may be
    missing from the file and are not judged. `compress_ratios` may or may not carry entries for the draft
    stages after those of the backbone. The runtime keys take no part in equality or in `digest`.

    Raises:
        ConfigError: on construction, when a value is out of range or inconsistent with another.
    """

    vocab_size: int
    dim: int
    moe_inter_dim: int
    n_layers: int
    n_mtp_layers: int = 0
    n_heads: int
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    score_func: str
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    route_scale: float
    swiglu_limit: float
    q_lora_rank: int
    head_dim: int
    rope_head_dim: int
    norm_eps: float
    o_groups: int
    o_lora_rank: int
    window_size: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    compress_rope_theta: float
    original_seq_len: int
    rope_theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_id: int = 0
    engram_compressed_vocab_size: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0
    vision_n_layers: int = 0
    vision_dim: int = 0
    vision_n_heads: int = 0
    vision_inter_dim: int = 0
    vision_patch_size: int = 0
    vision_rope_theta: float = 0.0
    vision_downsample_ratio: int = 0
    vision_max_n_token: int = 0
    vision_min_pixels: int = 0
    vision_max_wh_ratio: float | None = None
    image_token_id: int = -1
    dtype: str
    expert_dtype: str | None
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    max_position_embeddings: int | None = None
    max_batch_size: int = field(default=4, compare=False)
    max_seq_len: int = field(default=4096, compare=False)
    temperature: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        check_model(self)

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read a released `config.json` or a flat `inference/config.json`; raises `ConfigError`."""
        return cls.from_dict(read_json_object(Path(path), ConfigError, max_bytes=16 << 20), where=str(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], where: str = "config") -> ModelConfig:
        """Read either key set.

        A released document must also fit the 32-wide groups of its number formats; a flat one is held to that
        only where its weights are read as FP8 or FP4 (`require_quantized_groups`), because the reference runs
        the same file unquantised.

        Args:
            document: the parsed JSON.
            where: file to name in a message.

        Raises:
            ConfigError: naming the key as the file spells it.
        """
        is_hf = is_hf_document(document)
        values = flat_values(document, where, cls)
        try:
            config = cls(**values)
            if is_hf:
                config.require_quantized_groups()
        except ConfigError as error:
            raise ConfigError(
                f"{where}: {spelled(error.where, is_hf)}",
                found=error.found,
                expected=error.expected,
                remedy=error.remedy,
            ) from None
        return config

    def to_flat_dict(self) -> dict[str, Any]:
        """The reference's flat key set, runtime keys included; `from_dict` gives this config back."""
        return {item.name: _jsonable(getattr(self, item.name)) for item in fields(self)}

    def to_hf_dict(self) -> dict[str, Any]:
        """The released layout, without the runtime keys; `from_dict` gives an equal config back."""
        return hf_document(self.to_flat_dict())

    @property
    def has_vision(self) -> bool:
        """Whether the model has a vision tower, an aligner and `bias_vl`."""
        return self.vision_n_layers > 0

    @property
    def has_engram(self) -> bool:
        """Whether any layer has an Engram table."""
        return bool(self.engram_layer_ids)

    @property
    def has_dspark(self) -> bool:
        """Whether the model has draft stages."""
        return self.dspark_block_size > 0

    @property
    def has_candidates(self) -> bool:
        """Whether index sources above `candidate_source_layer` select inside its candidate blocks."""
        return self.candidate_source_layer >= 0

    @property
    def has_yarn(self) -> bool:
        """Whether layers with compressed entries use YaRN frequencies."""
        return self.original_seq_len > 0

    @property
    def engram_columns(self) -> int:
        """Engram rows per token and layer: (max_ngram - 1) * heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.has_engram else 0

    @property
    def hc_mixes(self) -> int:
        """Outputs of one hyper-connection projection: pre, post and the square combination matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def num_dspark_stages(self) -> int:
        """Draft stages with weights (`mtp.0` ...): 0 when drafting is off."""
        return self.n_mtp_layers if self.has_dspark else 0

    @property
    def num_dspark_routed_experts(self) -> int:
        """Experts of a draft stage; the backbone's number when the config says 0."""
        return self.dspark_n_routed_experts or self.n_routed_experts

    @property
    def num_dspark_activated_experts(self) -> int:
        """Experts chosen per token in a draft stage; the backbone's number when the config says 0."""
        return self.dspark_n_activated_experts or self.n_activated_experts

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The roles of all backbone layers."""
        return tuple(layer_config(self, layer_id) for layer_id in range(self.n_layers))

    def layer(self, layer_id: int) -> LayerConfig:
        """The role of one backbone layer; `ConfigError` for an id outside 0..n_layers-1."""
        if not 0 <= layer_id < self.n_layers:
            raise ConfigError(
                "layer_id",
                found=str(layer_id),
                expected=f"0..{self.n_layers - 1}",
                remedy="Name a layer of the backbone.",
            )
        return layer_config(self, layer_id)

    def identity(self) -> dict[str, Any]:
        """Every field that says which model this is: all but the runtime keys."""
        return {key: value for key, value in self.to_flat_dict().items() if key not in RUNTIME_KEYS}

    def digest(self) -> str:
        """SHA-256 (hex) of the identity as canonical JSON."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def require_quantized_groups(self) -> None:
        """Check that every quantised axis divides into the groups of 32 that FP8 and FP4 scales cover.

        Raises:
            ConfigError: naming the first key that does not.
        """
        if self.dtype != "fp8" and self.expert_dtype is None:
            return
        widths = {
            "dim": self.dim,
            "moe_inter_dim": self.moe_inter_dim,
            "q_lora_rank": self.q_lora_rank,
            "head_dim": self.head_dim,
            "o_lora_rank": self.o_groups * self.o_lora_rank,
        }
        if self.index_source_layers:
            widths["index_head_dim"] = self.index_head_dim
        for key, width in widths.items():
            if width % 32:
                raise ConfigError(
                    key,
                    found=f"{width} quantised values a row",
                    expected="a multiple of 32, which one scale covers",
                    remedy="Use a config whose sizes fit its number format.",
                )


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
