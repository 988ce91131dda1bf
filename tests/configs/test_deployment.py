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
        ({"devices": ["cpu", "gpu:1"]}, "devices[1]"),
        ({"devices": ["cuda"]}, "devices[0]"),
        ({"devices": ["cpu:x"]}, "devices[0]"),
        ({"stages": [{"device": "cpu", "layers": []}]}, "stages[0].layers"),
        ({"devices": ["cpu:0", "cpu:1"], "stages": [{"device": "cpu:0", "layers": [0, 1]}]}, "stages"),
        (
            {
                "devices": ["cpu:0", "cpu:1"],
                "stages": [{"device": d, "layers": [n, n]} for n, d in enumerate(["cpu:0", "cpu:1", "cpu:0"])],
            },
            "stages",
        ),
        ({"stages": [{"device": "cuda:9", "layers": [0, 1]}]}, "stages[0].device"),
        ({"stages": [{"device": "cpu", "layers": [1, 2]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu", "layers": [0, 2]}, {"device": "cpu", "layers": [2, 3]}]}, "stages[1].layers"),
        ({"stages": [{"device": "cpu", "layers": [0, -1]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu", "layers": [0]}]}, "stages[0].layers"),
        ({"stages": [{"device": "cpu"}]}, "stages[0]"),
        ({"stages": [3]}, "stages"),
        ({"dspark_taps": "yes"}, "dspark_taps"),
        ({"experts": "cpu"}, "experts"),
        ({"experts": [{"device": "cpu"}]}, "experts"),
        ({"experts": ["cpu:1"]}, "experts"),
        ({"devices": ["cpu:0", "cpu:1"], "experts": ["cpu:1", "cpu:1"]}, "experts"),
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
        (
            {"devices": [f"cuda:{n}" for n in range(17)], "experts": [f"cuda:{n}" for n in range(17)]},
            "experts",
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


@pytest.mark.parametrize(("second", "message"), [([5, 11], "layer 5 is placed twice"), ([7, 11], "layer 6 is placed")])
def test_a_layer_that_is_placed_twice_or_never_is_named(second: list[int], message: str) -> None:
    stages = [{"device": "cpu:0", "layers": [0, 5]}, {"device": "cpu:1", "layers": second}]
    with pytest.raises(DeploymentError, match=message):
        DeploymentConfig.from_dict({"devices": ["cpu:0", "cpu:1"], "stages": stages})


class TestForAnArtifact:
    """A file read beside an export says where stages run, and may not ask for other graphs."""

    exported = DeploymentConfig.from_dict({"dspark_taps": True, "limits": {"max_batch": 3}})

    def read(self, path: Path, text: str) -> DeploymentConfig:
        path.write_text(text)
        return DeploymentConfig.for_artifact(path, self.exported)

    def test_devices_are_taken_and_the_rest_stays(self, tmp_path: Path) -> None:
        text = 'devices = ["cpu:0", "cpu:1"]\n[engram]\nresidency = "mmap"\n[limits]\nmax_batch = 3\n'
        chosen = self.read(tmp_path / "d.toml", text)
        assert chosen.devices == ("cpu:0", "cpu:1")
        assert (chosen.dspark_taps, chosen.limits, chosen.engram.residency) == (True, self.exported.limits, "mmap")
        assert self.read(tmp_path / "e.toml", "") == self.exported

    def test_other_devices_void_the_exported_stages(self, tmp_path: Path) -> None:
        stages = [{"device": "cpu:0", "layers": [0, 5]}, {"device": "cpu:1", "layers": [6, 11]}]
        placed = DeploymentConfig.from_dict({"devices": ["cpu:0", "cpu:1"], "stages": stages})
        (tmp_path / "one.toml").write_text('devices = ["cpu"]')
        assert DeploymentConfig.for_artifact(tmp_path / "one.toml", placed).stages == ()

    def test_experts_are_spread_only_where_they_are_stages_of_their_own(self, tmp_path: Path) -> None:
        text = 'devices = ["cpu:0", "cpu:1"]\nexperts = ["cpu:1", "cpu:0"]\n'
        with pytest.raises(DeploymentError, match="export again with this file") as caught:
            self.read(tmp_path / "d.toml", text)
        assert caught.value.where == f"{tmp_path / 'd.toml'}: experts"
        split = DeploymentConfig.from_dict({"experts": ["cpu"]})
        chosen = DeploymentConfig.for_artifact(tmp_path / "d.toml", split)
        assert (chosen.experts, chosen.spreads_experts) == (("cpu:1", "cpu:0"), True)
        (tmp_path / "two.toml").write_text('devices = ["cpu:0", "cpu:1"]')
        assert not DeploymentConfig.for_artifact(tmp_path / "two.toml", split).experts
        assert not split.spreads_experts

    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ('dtype = "bfloat16"', "dtype"),
            ("dspark_taps = false", "dspark_taps"),
            ("[limits]\nmax_batch = 4", "limits"),
            ('cache_quantization = "reference"', "cache_quantization"),
        ],
    )
    def test_another_graph_is_refused(self, tmp_path: Path, text: str, key: str) -> None:
        with pytest.raises(DeploymentError, match="as the artefact was exported") as caught:
            self.read(tmp_path / "d.toml", text)
        assert caught.value.where == f"{tmp_path / 'd.toml'}: {key}"
