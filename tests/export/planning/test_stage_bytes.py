"""Bytes worked out from the config are those of the modules and of the files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import shapes_only
from engram_trt.export.planning.stage_bytes import chain_bytes
from engram_trt.export.stages.chain import DTYPE_NAMES, stage_specs
from engram_trt.export.tracing import weight_tensors


def chain_of(config: ModelConfig, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    compute = ComputeConfig(dtype=dtype)
    specs = stage_specs(config, compute, packed_experts=True, dspark_taps=False)
    return compute, specs


@pytest.mark.parametrize("preset", ["tiny", "released"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_are_those_of_the_modules(preset: str, dtype: torch.dtype) -> None:
    config = model_preset(preset)
    compute, specs = chain_of(config, dtype)
    kinds = {}
    for stage in chain_bytes(specs, config, DTYPE_NAMES[dtype]):
        kinds.setdefault((stage.spec.kind, stage.spec.layer_id in config.engram_layer_ids), stage)
    assert len(kinds) >= 11
    for stage in kinds.values():
        module = shapes_only(stage.spec, config, compute, None)
        found = {
            name: (tuple(t.shape), DTYPE_NAMES.get(t.dtype, "int64")) for name, t in weight_tensors(module).items()
        }
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in stage.dense.items()} == found


def test_released_numbers_of_the_specification() -> None:
    config = model_preset("released")
    _, specs = chain_of(config, torch.bfloat16)
    stages = {stage.spec.name: stage for stage in chain_bytes(specs, config, "bfloat16")}
    engram = {1: (98_462_906_368, 101_377_628_352), 14: (98_465_597_952, 101_380_404_048)}
    for layer_id, (parameters, table) in engram.items():
        stage = stages[f"block_{layer_id:02d}"]
        assert stage.table_bytes == table
        plain = 13_765_227_766 if layer_id == 14 else 13_754_511_990
        assert stage.parameters == plain + parameters
    assert stages["block_20"].parameters == 13_762_606_326
    assert stages["block_20"].stored_bytes == 7_400_451_800
    assert {stages[f"block_{n}"].stored_bytes for n in (24, 28, 32, 36)} == {7_395_076_568}
    assert stages["block_03"].expert_bytes == 7_219_445_760
    assert stages["embedding"].parameters == 661_913_600
    text = sum(stage.parameters for stage in stages.values())
    assert text == 748_494_684_784


def test_without_engram_no_stage_has_a_table() -> None:
    config = replace(model_preset("tiny"), engram_layer_ids=(), engram_num_embeddings=())
    _, specs = chain_of(config, torch.float32)
    assert {stage.table_bytes for stage in chain_bytes(specs, config, "float32")} == {0}
