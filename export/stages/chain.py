"""All stages of a model, in the order they run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.block import Block
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.rotary import inverse_frequencies
from engram_trt.export.modeling.weights import WeightSource, load_parameters
from engram_trt.export.stages import embedding, engram_hash
from engram_trt.export.stages.block import block_spec
from engram_trt.export.stages.embedding import EmbeddingStage, embedding_spec, rotary_families
from engram_trt.export.stages.engram_hash import EngramHashStage, engram_hash_spec
from engram_trt.export.stages.head import HeadStage, head_spec

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def stage_specs(
    config: ModelConfig,
    compute: ComputeConfig,
    *,
    packed_experts: bool,
    dspark_taps: bool,
    layers: Iterable[int] | None = None,
) -> tuple[StageSpec, ...]:
    """Specs of the whole chain, or of some layers only.

    Args:
        config: the model.
        compute: decides the stage dtype.
        packed_experts: routed experts stay FP4 codes.
        dspark_taps: DSpark target layers put out their tap.
        layers: layer ids to include without hash, embedding and head; None for everything.

    Returns:
        `engram_hash` (if the model has Engram), `embedding`, the blocks, `head`.
    """
    dtype = DTYPE_NAMES[compute.dtype]
    blocks = tuple(
        block_spec(config, config.layer(layer_id), dtype, packed_experts=packed_experts, dspark_taps=dspark_taps)
        for layer_id in (range(config.n_layers) if layers is None else layers)
    )
    if layers is not None:
        return blocks
    first = (engram_hash_spec(config),) if config.has_engram else ()
    return (*first, embedding_spec(config, dtype), *blocks, head_spec(config, dtype))


def stage_module(
    spec: StageSpec, config: ModelConfig, compute: ComputeConfig, token_map: Tensor | None = None
) -> nn.Module:
    """The module of a stage, weights not yet loaded.

    Args:
        spec: which stage.
        config, compute: the model and its numerics.
        token_map: [vocab_size] int64 for `engram_hash`.
    """
    if spec.layer_id is not None:
        return Block(config, config.layer(spec.layer_id), compute)
    if spec.name == engram_hash.NAME:
        return EngramHashStage(config, token_map)
    return EmbeddingStage(config, compute) if spec.name == embedding.NAME else HeadStage(config, compute)


def computed_names(spec: StageSpec, config: ModelConfig) -> tuple[str, ...]:
    """Weights of a stage that follow from the config or the tokenizer; the checkpoint has no such tensors."""
    if spec.name == engram_hash.NAME:
        return ("token_map", "multipliers", "primes", "offsets")
    if spec.name == embedding.NAME:
        return tuple(f"{family}_frequencies" for family in rotary_families(config))
    if spec.layer_id is not None and config.layer(spec.layer_id).is_kv_source:
        return ("attn.entry_frequencies",) if config.layer(spec.layer_id).compress_ratio > 1 else ()
    return ()


def computed_weights(spec: StageSpec, config: ModelConfig, token_map: Tensor | None) -> dict[str, Tensor]:
    """The values of `computed_names`.

    Args:
        spec: the stage.
        config: the model.
        token_map: [vocab_size] int64; needed for `engram_hash`.
    """
    names = computed_names(spec, config)
    if not names:
        return {}
    if spec.name == engram_hash.NAME:
        weights = dict(EngramHashStage(config, token_map).named_parameters())
        return {name: weights[name] for name in names}
    if spec.layer_id is not None:
        return {names[0]: inverse_frequencies(config, config.layer(spec.layer_id).compress_ratio)}
    return {
        name: inverse_frequencies(config, ratio)
        for name, ratio in zip(names, rotary_families(config).values(), strict=True)
    }


def stage_prefix(spec: StageSpec) -> str:
    """What the checkpoint puts in front of the stage's parameter names."""
    return "" if spec.layer_id is None else f"layers.{spec.layer_id}."


def load_stage(module: nn.Module, spec: StageSpec, source: WeightSource) -> None:
    """Fill a stage's module from a checkpoint; raises CheckpointError."""
    load_parameters(module, source, stage_prefix(spec), computed_names(spec, source.config))
