"""Both key sets, round trips, identity, and the values the released config must give."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
RELEASED_FILE = Path(__file__).parents[2] / "configs" / "models" / "released.json"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_flat_config_survives_both_round_trips(path: Path) -> None:
    document = json.loads(path.read_text())
    config = ModelConfig.from_file(path)
    flat = config.to_flat_dict()
    assert {key: flat[key] for key in document} == document
    assert ModelConfig.from_dict(flat) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_hf_dict()))) == config


def test_the_released_config_survives_its_round_trip_key_by_key() -> None:
    document = json.loads(RELEASED_FILE.read_text())
    assert ModelConfig.from_dict(document).to_hf_dict() == document


def test_released_and_flat_key_sets_describe_the_same_model() -> None:
    released = model_preset("released")
    flat = released.to_flat_dict()
    assert flat["dim"] == 5120
    assert flat["window_size"] == 128
    assert flat["route_scale"] == 1.5
    assert flat["candidate_topk_blocks"] == 2048
    assert flat["vision_max_n_token"] == 1024
    assert flat["dspark_n_activated_experts"] == 3
    assert flat["dtype"] == "fp8"
    assert flat["expert_dtype"] == "fp4"
    assert flat["original_seq_len"] == 65536
    assert len(flat["compress_ratios"]) == 43
    assert ModelConfig.from_dict(flat).digest() == released.digest()


def test_derived_facts_of_the_released_model() -> None:
    config = model_preset("released")
    assert config.engram_columns == 24
    assert config.hc_mixes == 24
    assert config.num_dspark_stages == 3
    assert config.num_dspark_routed_experts == 128
    assert (config.has_vision, config.has_engram, config.has_dspark, config.has_yarn) == (True,) * 4


def test_off_switches() -> None:
    flat = model_preset("released").to_flat_dict()
    for key in [key for key in flat if key.startswith(("vision_", "dspark_", "engram_"))]:
        del flat[key]
    flat |= {"candidate_source_layer": -1, "original_seq_len": 0, "swiglu_limit": 0}
    config = ModelConfig.from_dict(flat)
    switches = (config.has_vision, config.has_engram, config.has_dspark, config.has_candidates, config.has_yarn)
    assert not any(switches)
    assert config.engram_columns == 0
    assert config.num_dspark_stages == 0
    assert not any(layer.uses_candidates or layer.is_candidate_source for layer in config.layers)
    assert ModelConfig.from_dict(config.to_hf_dict()) == config


def test_dspark_expert_counts_fall_back_to_the_backbone() -> None:
    flat = model_preset("released").to_flat_dict()
    config = ModelConfig.from_dict(flat | {"dspark_n_routed_experts": 0, "dspark_n_activated_experts": 0})
    assert (config.num_dspark_routed_experts, config.num_dspark_activated_experts) == (384, 6)


def test_ratio_lists_with_and_without_draft_stages_are_read() -> None:
    flat = model_preset("released").to_flat_dict()
    short = ModelConfig.from_dict(flat | {"compress_ratios": flat["compress_ratios"][:40]})
    assert [layer.kind for layer in short.layers] == [layer.kind for layer in model_preset("released").layers]


def test_vision_values_are_not_judged_when_vision_is_off() -> None:
    flat = model_preset("released").to_flat_dict()
    off = {"vision_n_layers": 0, "vision_dim": "wide", "vision_n_heads": -7, "image_token_id": None}
    config = ModelConfig.from_dict(flat | off)
    assert not config.has_vision
    assert ModelConfig.from_dict(config.to_flat_dict()) == config


def test_runtime_keys_take_no_part_in_identity() -> None:
    flat = model_preset("tiny").to_flat_dict()
    other = ModelConfig.from_dict(flat | {"max_batch_size": 9, "max_seq_len": 77, "temperature": 0.0})
    assert (other.max_batch_size, other.max_seq_len, other.temperature) == (9, 77, 0.0)
    assert other == model_preset("tiny")
    assert other.digest() == model_preset("tiny").digest()
    assert not {"max_batch_size", "max_seq_len", "temperature"} & other.identity().keys()


def test_digest_changes_with_any_other_key() -> None:
    flat = model_preset("tiny").to_flat_dict()
    digests = {model_preset("tiny").digest()}
    for change in ({"route_scale": 1.25}, {"bos_token_id": 7}, {"norm_eps": 1e-6}, {"index_topk": 31}):
        digests.add(ModelConfig.from_dict(flat | change).digest())
    assert len(digests) == 5


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        model_preset("tiny").dim = 1  # type: ignore[misc]


def test_layer_ids_are_checked() -> None:
    config = model_preset("tiny")
    assert config.layer(11).layer_id == 11
    for layer_id in (-1, 12):
        with pytest.raises(ConfigError, match=r"layer_id: found .*expected 0\.\.11"):
            config.layer(layer_id)


def test_the_tiny_preset_has_every_kind_of_the_released_one() -> None:
    def kinds(config: ModelConfig) -> set[str]:
        return {layer.kind for layer in config.layers}

    tiny = model_preset("tiny")
    assert kinds(tiny) == kinds(model_preset("released"))
    demo_prompt = 512
    assert tiny.window_size < demo_prompt
    # Ratio 2 halves the entries; both top-k and candidate population must be exceeded there too.
    assert tiny.index_topk < demo_prompt // 2
    assert tiny.candidate_topk_blocks * tiny.candidate_block_size < demo_prompt
    assert 0 < tiny.original_seq_len < demo_prompt
    assert tiny.has_vision
    assert tiny.has_dspark


def test_hostile_numbers_are_refused_before_they_cost_anything() -> None:
    flat = model_preset("released").to_flat_dict()
    for key in ("n_routed_experts", "vision_n_layers", "hc_sinkhorn_iters", "engram_n_heads", "n_layers"):
        with pytest.raises(ConfigError, match=key):
            ModelConfig.from_dict(flat | {key: 10**15})
