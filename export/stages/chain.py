"""All stages of a model, in the order they run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec
from engram_trt.export.modeling.block import Block
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.rotary import inverse_frequencies
from engram_trt.export.modeling.split_block import ChoiceHalf, RoutedExperts, SumHalf
from engram_trt.export.modeling.weights import WeightSource, load_parameters
from engram_trt.export.stages.embedding import EmbeddingStage
from engram_trt.export.stages.engram_hash import EngramHashStage
from engram_trt.export.stages.head import HeadStage
from engram_trt.export.stages.interfaces import EMBEDDING, ENGRAM_HASH, chain_specs, computed_names
from engram_trt.export.stages.rotary_families import rotary_families
from engram_trt.export.stages.split_block import EXPERT_SUM, chooses_experts

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def stage_specs(
    config: ModelConfig,
    compute: ComputeConfig,
    *,
    packed_experts: bool,
    dspark_taps: bool,
    split_experts: bool = False,
    layers: Iterable[int] | None = None,
) -> tuple[StageSpec, ...]:
    """`chain_specs` in the stage dtype of `compute`."""
    dtype = DTYPE_NAMES[compute.dtype]
    return chain_specs(
        config,
        dtype,
        packed_experts=packed_experts,
        dspark_taps=dspark_taps,
        split_experts=split_experts,
        layers=layers,
    )


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
        return _layer_module(spec, config, config.layer(spec.layer_id), compute)
    if spec.name == ENGRAM_HASH:
        return EngramHashStage(config, token_map)
    return EmbeddingStage(config, compute) if spec.name == EMBEDDING else HeadStage(config, compute)


def _layer_module(spec: StageSpec, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> nn.Module:
    if spec.kind == EXPERTS:
        return RoutedExperts(config, compute)
    if spec.kind == EXPERT_SUM:
        return SumHalf(config, compute)
    return ChoiceHalf(config, layer, compute) if chooses_experts(spec) else Block(config, layer, compute)


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
    if spec.name == ENGRAM_HASH:
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
