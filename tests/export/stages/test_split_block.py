"""A layer in three stages is the layer in one: the same weights, each once, and the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_model import small_config, small_engine

from engram_trt.configs.inventory import layer_tensors
from engram_trt.configs.preset_files import model_preset
from engram_trt.configs.tensors import EXPERTS
from engram_trt.export.stages.interfaces import chain_specs
from engram_trt.export.stages.split_block import EXPERT_SUM, chooses_experts, holds
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session

torch.set_num_threads(1)
IDS = [int(token) for token in np.random.default_rng(4).integers(3, 90, 30)]


def logits(engine: Engine) -> np.ndarray:
    session = Session(engine)
    row = session.add()
    out = [session.prefill(row, IDS[:22], "all")]
    return np.concatenate(out + [session.step({row: [token]})[row][None] for token in IDS[22:]])


@pytest.mark.parametrize(
    ("model", "deployment"),
    [
        ({}, {}),
        ({}, {"dtype": "bfloat16"}),
        ({}, {"activation_quantization": "reference", "cache_quantization": "reference"}),
        ({"score_func": "sigmoid", "norm_topk_prob": False, "n_activated_experts": 1}, {}),
        ({"swiglu_limit": 0.0, "n_activated_experts": 4}, {"dtype": "bfloat16"}),
    ],
)
def test_three_stages_give_the_bits_of_one(model: dict[str, Any], deployment: dict[str, Any]) -> None:
    config = small_config(**model)
    whole, split = small_engine(config, **deployment), small_engine(config, experts=("cpu",), **deployment)
    assert len(split.stages) == len(whole.stages) + 2 * config.n_layers
    np.testing.assert_array_equal(logits(split), logits(whole))


@pytest.mark.parametrize("preset", ["tiny", "released"])
def test_every_tensor_of_a_layer_belongs_to_one_of_its_stages(preset: str) -> None:
    config = model_preset(preset)
    specs = chain_specs(config, "float32", packed_experts=True, dspark_taps=False, split_experts=True)
    for layer_id in (0, 1, 2, 3):
        stages = [spec for spec in specs if spec.layer_id == layer_id]
        assert [stage.name for stage in stages] == [f"block_0{layer_id}{part}" for part in ("", "_experts", "_sum")]
        owners = {name: [s for s in stages if holds(s, name)] for name in layer_tensors(config, layer_id)}
        assert {len(found) for found in owners.values()} == {1}
        assert owners[f"layers.{layer_id}.ffn.experts.3.w2.weight"][0].kind == EXPERTS
        assert owners[f"layers.{layer_id}.ffn.shared_experts.w1.weight"][0].kind == EXPERT_SUM
        assert chooses_experts(owners[f"layers.{layer_id}.ffn.gate.weight"][0])


def test_stages_of_all_layers_share_one_graph_of_experts() -> None:
    config = model_preset("released")
    split = chain_specs(config, "bfloat16", packed_experts=True, dspark_taps=False, split_experts=True)
    whole = chain_specs(config, "bfloat16", packed_experts=True, dspark_taps=False)
    assert len({spec.kind for spec in split}) == len({spec.kind for spec in whole}) + 2
    bindings = {tuple((t.name, t.shape) for t in spec.inputs) for spec in split if spec.kind == EXPERTS}
    assert len(bindings) == 1
