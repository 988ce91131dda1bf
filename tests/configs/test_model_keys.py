"""Keys of both files: unknown, missing, mistyped, taken for granted, ignored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset

RELEASED_FILE = Path(__file__).parents[2] / "configs" / "models" / "released.json"
RELEASED: dict[str, Any] = json.loads(RELEASED_FILE.read_text())
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(RELEASED)
    *sections, key = path.split(".")
    target = document
    for section in sections:
        target = target[section]
    if value is MISSING:
        del target[key]
    else:
        target[key] = value
    return document


def rejection(document: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(document, where="config.json")
    return caught.value


@pytest.mark.parametrize(
    "path",
    [
        "text_config.sliding_windows",
        "text_config.num_hash_layers",
        "vision_config.qkv_bias",
        "quantization_config.modules_to_not_convert",
        "text_config.rope_scaling.mscale",
        "text_config.text_config",
        "rope_scaling",
        "new_key",
    ],
)
def test_an_unknown_released_key_is_rejected(path: str) -> None:
    for value in (1, {}, None):
        error = rejection(changed(path, value))
        assert error.where == f"config.json: {path}"
        assert error.found == "an unknown key"


def test_a_near_miss_is_pointed_out() -> None:
    assert "sliding_window" in rejection(changed("text_config.sliding_windows", 1)).remedy
    flat = model_preset("tiny").to_flat_dict() | {"n_layer": 3}
    assert "n_layers" in rejection(flat).remedy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("architectures", ["DeepseekV4ForCausalLM"]),
        ("model_type", "deepseek_v4"),
        ("dtype", "float16"),
        ("text_config.model_type", "deepseek_v4"),
        ("text_config.num_key_value_heads", 8),
        ("text_config.hidden_act", "gelu"),
        ("text_config.topk_method", "greedy"),
        ("text_config.attention_bias", True),
        ("text_config.attention_bias", 0),
        ("text_config.attention_dropout", 0.1),
        ("text_config.tie_word_embeddings", True),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float32"),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.expert_dtype", "int4"),
        ("quantization_config.weight_block_size", MISSING),
        ("quantization_config.scale_fmt", MISSING),
        ("quantization_config.quant_method", MISSING),
        ("text_config.eos_token_id", 5),
    ],
)
def test_a_value_taken_for_granted_is_verified(path: str, value: Any) -> None:
    assert rejection(changed(path, value)).where == f"config.json: {path}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformers_version", "5.0"),
        ("auto_map", {"AutoModel": "modeling_evil.Evil"}),
        ("torch_dtype", "bfloat16"),
        ("use_cache", True),
        ("text_config.initializer_range", 0.02),
        ("text_config.use_cache", True),
        ("text_config.eos_token_id", 1),
        ("text_config.rope_scaling.type", "yarn"),
        ("vision_config.dtype", "bfloat16"),
        ("tie_word_embeddings", False),
    ],
)
def test_harmless_keys_change_nothing(path: str, value: Any) -> None:
    assert ModelConfig.from_dict(changed(path, value)) == ModelConfig.from_dict(RELEASED)


@pytest.mark.parametrize(
    "path",
    [
        "text_config.hidden_size",
        "text_config.compress_ratios",
        "text_config.engram_head_dim",
        "text_config.dspark_markov_rank",
        "text_config.candidate_block_size",
        "text_config.num_nextn_predict_layers",
        "text_config.rms_norm_eps",
        "vision_config.patch_size",
        "image_token_id",
        "text_config",
    ],
)
def test_a_missing_key_is_named(path: str) -> None:
    error = rejection(changed(path, MISSING))
    assert error.where == f"config.json: {path}"
    assert error.found.startswith("no such")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.hidden_size", "5120"),
        ("text_config.hidden_size", 5120.0),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", None),
        ("text_config.norm_topk_prob", 1),
        ("text_config.routed_scaling_factor", "1.5"),
        ("text_config.routed_scaling_factor", 10**400),
        ("text_config.compress_ratios", 2),
        ("text_config.compress_ratios", [0, "2"]),
        ("text_config.scoring_func", 3),
        ("vision_config.max_wh_ratio", "wide"),
        ("text_config.rope_scaling", 16),
    ],
)
def test_a_mistyped_value_is_rejected(path: str, value: Any) -> None:
    assert rejection(changed(path, value)).where == f"config.json: {path}"


def test_no_rope_scaling_means_no_yarn() -> None:
    for value in (None, MISSING):
        config = ModelConfig.from_dict(changed("text_config.rope_scaling", value))
        assert not config.has_yarn


def test_no_vision_section_means_no_vision() -> None:
    config = ModelConfig.from_dict(changed("vision_config", MISSING))
    assert not config.has_vision
    assert not ModelConfig.from_dict(changed("vision_config", None)).has_vision


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"[1, 2]", "JSON list"),
        (b'{"dim": 1, "dim": 2}', "'dim' twice"),
        (b'{"dim": NaN}', "NaN"),
        (b"\xff\xfe", "no valid JSON"),
        (b'{"a":' * 100000, "JSON"),
    ],
)
def test_a_file_that_is_no_json_object_is_an_error(tmp_path: Path, text: bytes, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert str(path) in caught.value.where
    assert what in caught.value.found


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        ModelConfig.from_file(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_file(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(model_preset("tiny").to_flat_dict())), json_values)
def test_any_value_of_any_key_loads_or_is_a_config_error(key: str, value: Any) -> None:
    flat = model_preset("tiny").to_flat_dict()
    try:
        config = ModelConfig.from_dict(flat | {key: value})
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_flat_dict()) == config


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*RELEASED, *(f"text_config.{key}" for key in RELEASED["text_config"])]), json_values)
def test_any_value_in_the_released_file_loads_or_is_a_config_error(path: str, value: Any) -> None:
    try:
        config = ModelConfig.from_dict(changed(path, value))
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_hf_dict()) == config
