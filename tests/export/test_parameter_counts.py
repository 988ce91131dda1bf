"""The modules' shapes give the published parameter counts of the released model (spec 7, "Counts")."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.weights import resident_tensor_names
from engram_trt.export.onnx_export import shapes_only
from engram_trt.export.stages.chain import computed_names, stage_specs


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return model_preset("released")


@pytest.fixture(scope="module")
def specs(config: ModelConfig) -> dict[str, StageSpec]:
    stages = stage_specs(config, ComputeConfig(), packed_experts=True, dspark_taps=False)
    return {spec.name: spec for spec in stages}


def dense_count(spec: StageSpec, config: ModelConfig, prefix: str = "") -> int:
    """Parameters of a stage's module whose name starts with `prefix`."""
    module = shapes_only(spec, config, ComputeConfig(), torch.zeros(config.vocab_size, dtype=torch.int64))
    computed = computed_names(spec, config)
    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if name not in computed and name.startswith(prefix)
    )


@cache
def _shapes() -> dict[str, TensorShape]:
    return checkpoint_tensors(model_preset("released"))


def resident_count(spec: StageSpec, config: ModelConfig, prefix: str) -> int:
    """Parameters bound from the checkpoint: two per byte of packed experts, scales not counted."""
    shapes = _shapes()
    return sum(
        math.prod(shapes[name].shape) * (2 if shapes[name].dtype == "I8" else 1)
        for tensor in spec.inputs
        if tensor.role == "resident" and tensor.name.startswith(prefix) and "scale" not in tensor.name
        for name in resident_tensor_names(config, tensor)
    )


def block_count(spec: StageSpec, config: ModelConfig) -> int:
    """A layer without its Engram module."""
    return dense_count(spec, config) - dense_count(spec, config, "engram.") + resident_count(spec, config, "experts_")


@pytest.mark.parametrize(
    ("layer_id", "expected"),
    [
        (2, 13_765_227_766),
        (8, 13_765_227_766),
        (14, 13_765_227_766),
        (20, 13_762_606_326),
        (24, 13_759_918_710),
        (36, 13_759_918_710),
        (0, 13_754_511_990),
        (1, 13_754_511_990),
        (39, 13_754_511_990),
    ],
)
def test_layers(specs: dict[str, StageSpec], config: ModelConfig, layer_id: int, expected: int) -> None:
    assert block_count(specs[f"block_{layer_id:02d}"], config) == expected


@pytest.mark.parametrize(("layer_id", "expected"), [(1, 98_462_906_368), (14, 98_465_597_952)])
def test_engram(specs: dict[str, StageSpec], config: ModelConfig, layer_id: int, expected: int) -> None:
    spec = specs[f"block_{layer_id:02d}"]
    assert dense_count(spec, config, "engram.") + resident_count(spec, config, "engram_rows") == expected


@pytest.mark.parametrize(
    ("layer_id", "expected"), [(2, 137_333_184), (0, 126_617_408), (20, 134_711_744), (24, 132_024_128)]
)
def test_attention(specs: dict[str, StageSpec], config: ModelConfig, layer_id: int, expected: int) -> None:
    assert dense_count(specs[f"block_{layer_id:02d}"], config, "attn.") == expected


def test_embedding_and_head(specs: dict[str, StageSpec], config: ModelConfig) -> None:
    assert dense_count(specs["embedding"], config) == 661_913_600
    assert dense_count(specs["head"], config, "head.") == 661_913_600


def test_text_path(specs: dict[str, StageSpec], config: ModelConfig) -> None:
    dense = sum(dense_count(spec, config) for spec in specs.values())
    resident = sum(resident_count(spec, config, "") for spec in specs.values())
    assert dense + resident == 748_494_684_784
    assert dense + resident - sum(resident_count(spec, config, "engram_rows") for spec in specs.values()) == (
        551_880_835_184
    )
