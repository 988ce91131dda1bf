"""The launcher's variables, and what all ranks must have in common."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ClusterError, DeploymentError
from engram_trt.runtime.distributed.agreement import refusal
from engram_trt.runtime.distributed.launch import LaunchRequest, deployment_for
from engram_trt.runtime.distributed.ranks import launched_rank

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "7", "LOCAL_RANK": "1"}


def test_alone_without_a_launcher() -> None:
    assert launched_rank({}) is None
    assert launched_rank({**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_a_launched_rank() -> None:
    rank = launched_rank({**LAUNCHED, "LOCAL_WORLD_SIZE": "2"})
    assert rank is not None
    assert (rank.number, rank.world_size, rank.local_number, rank.local_world_size) == (1, 4, 1, 2)
    assert (rank.address, rank.is_one_host) == ("node:7", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "RANK=4"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "no MASTER_PORT"),
        ({"MASTER_ADDR": ""}, "no MASTER_ADDR"),
    ],
)
def test_a_broken_environment_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        launched_rank({**LAUNCHED, **changes})


OWN = {"artefact": "a" * 64, "deployment": "d" * 64, "back end": "onnxruntime", "versions": {"numpy": "2.4.6"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artefact": "b" * 64}, r"rank 1: artefact: found bbbbbbbbbbbb\.\.\.; expected aaaaaaaaaaaa\.\.\."),
        ({"deployment": "e" * 64}, "rank 1: deployment"),
        ({"back end": "torch"}, "rank 1: back end: found torch; expected onnxruntime"),
        ({"versions": {"numpy": "2.0"}}, "found numpy 2.0; expected numpy 2.4.6"),
        ({"versions": {}}, "numpy missing"),
    ],
)
def test_a_rank_that_differs_is_refused(changes: dict[str, object], message: str) -> None:
    error = refusal(OWN, {0: json.dumps(OWN), 1: json.dumps({**OWN, **changes})})
    assert error is not None
    with pytest.raises(ClusterError, match=message):
        raise error


def test_a_rank_that_cannot_start_is_named_with_its_reason() -> None:
    error = refusal(OWN, {0: json.dumps(OWN), 2: json.dumps({"error": "/there: found no such folder"})})
    assert error is not None
    assert "rank 2: start: found /there: found no such folder" in str(error)
    assert refusal(OWN, {0: json.dumps(OWN), 1: json.dumps(OWN)}) is None


def request(deployment: Path | None = None, backend: str = "onnxruntime") -> LaunchRequest:
    return LaunchRequest(command="c", artifact=Path(), checkpoint=None, backend=backend, deployment=deployment)


def test_without_a_file_every_rank_is_a_device() -> None:
    chosen, named = deployment_for(3, DeploymentConfig(), request())
    assert (chosen.devices, chosen.stages, named) == (("cpu:0", "cpu:1", "cpu:2"), (), False)
    chosen, _ = deployment_for(2, DeploymentConfig(), request(backend="tensorrt"))
    assert chosen.devices == ("cuda:0", "cuda:1")


def test_exported_devices_are_used_where_they_are_as_many_as_ranks() -> None:
    exported = DeploymentConfig(devices=("cpu:1", "cpu:0"))
    assert deployment_for(2, exported, request()) == (exported, True)


def test_the_number_of_ranks_must_match_a_file(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('devices = ["cpu:0", "cpu:1"]\n')
    assert deployment_for(2, DeploymentConfig(), request(file))[1]
    with pytest.raises(DeploymentError, match="2 devices; expected 3, one for each process"):
        deployment_for(3, DeploymentConfig(), request(file))
