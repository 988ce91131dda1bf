"""Deployment files: defaults, every key, every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engram_trt.configs.deployment import DeploymentConfig, StagePlacement
from engram_trt.configs.errors import ConfigError, DeploymentError
from engram_trt.configs.preset_files import PRESETS, deployment_preset, model_preset

EVERYTHING = """
dtype = "bfloat16"
activation_quantization = "reference"
cache_quantization = "none"
devices = ["cuda:0", "cuda:1"]
dspark_taps = true

[limits]
max_batch = 2
max_step_tokens = 64
max_context = 512
max_rollback = 0

[[stages]]
device = "cuda:0"
layers = [0, 5]

[[stages]]
device = "cuda:1"
layers = [6, 11]
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(EVERYTHING)
    config = DeploymentConfig.from_file(path)
    assert (config.dtype, config.activation_quantization, config.cache_quantization) == (
        "bfloat16",
        "reference",
        "none",
    )
    limits = config.limits
    assert (limits.max_batch, limits.max_step_tokens, limits.max_context, limits.max_rollback) == (2, 64, 512, 0)
    assert config.devices == ("cuda:0", "cuda:1")
    assert config.stages[1] == StagePlacement(device="cuda:1", layers=(6, 11))
    assert config.dspark_taps
    config.require_fits(model_preset("tiny"))
    assert DeploymentConfig.from_dict(config.to_dict()) == config


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text("")
    assert DeploymentConfig.from_file(path) == DeploymentConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_their_models(name: str) -> None:
    deployment_preset(name).require_fits(model_preset(name))


def test_an_unknown_preset_is_an_error() -> None:
    for read in (model_preset, deployment_preset):
        for name in ("huge", "../../secret"):
            with pytest.raises(ConfigError, match="preset"):
                read(name)


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"dtyp": "float32"}, "dtyp"),
        ({"limits": {"max_batches": 1}}, "limits.max_batches"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": 32}, "dtype"),
        ({"activation_quantization": "fp8"}, "activation_quantization"),
        ({"cache_quantization": True}, "cache_quantization"),
        ({"limits": 3}, "limits"),
        ({"limits": {"max_batch": 0}}, "limits.max_batch"),
        ({"limits": {"max_batch": True}}, "limits.max_batch"),
        ({"limits": {"max_batch": 1.5}}, "limits.max_batch"),
        ({"limits": {"max_step_tokens": 0}}, "limits.max_step_tokens"),
        ({"limits": {"max_step_tokens": 600, "max_context": 512}}, "limits.max_step_tokens"),
        ({"limits": {"max_context": 2**31}}, "limits.max_context"),
        ({"limits": {"max_rollback": -1}}, "limits.max_rollback"),
        ({"devices": []}, "devices"),
        ({"devices": ["cpu", "cpu"]}, "devices"),
        ({"devices": "cpu"}, "devices"),
        ({"devices": [1]}, "devices"),
        ({"stages": [{"device": "cuda:9", "layers": [0, 1]}]}, "stages[0].device"),
        ({"stages": [{"device": "cpu", "layers": [1, 2]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu", "layers": [0, 2]}, {"device": "cpu", "layers": [2, 3]}]}, "stages[1].layers"),
        ({"stages": [{"device": "cpu", "layers": [0, -1]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu", "layers": [0]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu"}]}, "stages[0]"),
        ({"stages": [3]}, "stages"),
        ({"dspark_taps": "yes"}, "dspark_taps"),
    ],
)
def test_a_bad_value_is_named_with_its_file(document: dict[str, Any], key: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        DeploymentConfig.from_dict(document, where="deployment.toml")
    assert caught.value.where == f"deployment.toml: {key}"


def test_a_near_miss_is_pointed_out() -> None:
    with pytest.raises(DeploymentError, match=r"Did you mean limits\.max_batch\?"):
        DeploymentConfig.from_dict({"limits": {"max_batchs": 1}})


@pytest.mark.parametrize("text", ["dtype = ", "dtype = 'a'\ndtype = 'b'", "\udcff"])
def test_a_file_that_is_no_toml_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(DeploymentError, match="no valid TOML"):
        DeploymentConfig.from_file(path)
    with pytest.raises(DeploymentError, match="cannot be read"):
        DeploymentConfig.from_file(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"limits": {"max_context": 4097}}, "limits.max_context"),
        ({"stages": [{"device": "cpu", "layers": [0, 10]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu", "layers": [0, 12]}]}, "stages[0].layers"),
        (
            {
                "devices": ["cpu", "cuda:0"],
                "stages": [{"device": "cpu", "layers": [0, 6]}, {"device": "cuda:0", "layers": [7, 11]}],
            },
            "stages[1].layers",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(document: dict[str, Any], key: str) -> None:
    config = DeploymentConfig.from_dict(document)
    with pytest.raises(DeploymentError) as caught:
        config.require_fits(model_preset("tiny"))
    assert caught.value.where == key


def test_a_cut_anywhere_is_allowed_on_one_device() -> None:
    stages = [{"device": "cpu", "layers": [0, 6]}, {"device": "cpu", "layers": [7, 11]}]
    DeploymentConfig.from_dict({"stages": stages}).require_fits(model_preset("tiny"))


def test_taps_need_draft_stages() -> None:
    from engram_trt.configs.model import ModelConfig

    config = ModelConfig.from_dict(model_preset("tiny").to_flat_dict() | {"dspark_block_size": 0})
    with pytest.raises(DeploymentError, match="dspark_taps"):
        DeploymentConfig(dspark_taps=True).require_fits(config)
