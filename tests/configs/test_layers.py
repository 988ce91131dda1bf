"""Layer roles of the released schedule (spec 1, "Layer roles"), and of the smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram_trt.configs.layers import free_boundaries
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset


def test_roles_of_the_released_model() -> None:
    layers = model_preset("released").layers
    assert [layer.layer_id for layer in layers] == list(range(40))
    assert [layer.compress_ratio for layer in layers] == [0] * 2 + [2] * 18 + [1] * 20
    assert [layer.layer_id for layer in layers if layer.is_kv_source] == [2, 8, 14, 20]
    assert [layer.layer_id for layer in layers if layer.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.layer_id for layer in layers if layer.is_candidate_source] == [20]
    assert [layer.layer_id for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert {layer.layer_id: layer.engram_index for layer in layers if layer.has_engram} == {1: 0, 14: 1}
    assert [layer.layer_id for layer in layers if layer.is_dspark_target] == [37, 38, 39]


def test_what_each_released_layer_reads() -> None:
    layers = model_preset("released").layers
    kv_sources = [layer.kv_source for layer in layers]
    assert kv_sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    index_sources = [layer.index_source for layer in layers]
    assert index_sources[:20] == kv_sources[:20]
    assert index_sources[20:] == [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4


def test_kinds_of_the_released_model() -> None:
    kinds = [layer.kind for layer in model_preset("released").layers]
    assert kinds[:4] == ["window", "window_engram", "r2_source", "r2_reader"]
    assert kinds[8] == "r2_source"
    assert kinds[14] == "r2_source_engram"
    assert kinds[20:25] == ["r1_source_candidates", "r1_reader", "r1_reader", "r1_reader", "r1_reindex"]
    assert kinds[36:] == ["r1_reindex", "r1_reader_tap", "r1_reader_tap", "r1_reader_tap"]
    assert len(set(kinds)) == 9


def test_reindexing_without_candidates_is_another_kind(flat_config: Callable[[str], dict[str, Any]]) -> None:
    config = ModelConfig.from_dict(flat_config("nocand6"))
    assert config.layer(5).kind == "r1_reindex_all"
    assert not config.layer(5).uses_candidates
    assert config.layer(5).kv_source == 3


def test_taps_disappear_with_the_draft_stages() -> None:
    flat = model_preset("released").to_flat_dict() | {"dspark_block_size": 0}
    assert not any(layer.is_dspark_target for layer in ModelConfig.from_dict(flat).layers)


def test_free_boundaries(flat_config: Callable[[str], dict[str, Any]]) -> None:
    assert free_boundaries(model_preset("released")) == (2, 8, 14, 20, 40)
    assert free_boundaries(model_preset("tiny")) == (2, 4, 6, 12)
    assert free_boundaries(ModelConfig.from_dict(flat_config("nocand6"))) == (1, 3, 6)


def test_a_source_inside_the_reach_of_candidates_is_no_free_boundary() -> None:
    flat = model_preset("released").to_flat_dict()
    flat |= {"kv_source_layers": [2, 8, 14, 20, 24]}
    config = ModelConfig.from_dict(flat)
    assert config.layer(24).kind == "r1_source_filtered"
    assert free_boundaries(config) == (2, 8, 14, 20, 40)
