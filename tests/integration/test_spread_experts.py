"""Experts on several devices under ONNX Runtime: the bits of the ordinary export on one device, for any spread."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS
from engram_trt.export.planning.facts import model_facts
from engram_trt.export.planning.plan import Plan, PlanRequest
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.generation import GenerationConfig, generate_together
from engram_trt.runtime.session import Session

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 1024, 140)]
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def story(engine: Engine) -> list[np.ndarray]:
    """A prompt in two chunks, decoding, a rollback, and taps."""
    session = Session(engine)
    row = session.add()
    out = [session.prefill(row, IDS[:130], "all")]
    out += [session.step({row: [token]})[row] for token in IDS[130:134]]
    session.rollback(row, 3)
    out += [session.step({row: IDS[134:140]}, "all")[row], *session.taps.values()]
    return out


@pytest.fixture(scope="module")
def split(split_artifact: Path) -> Artifact:
    return Artifact.open(split_artifact)


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> list[np.ndarray]:
    """Of the ordinary export on one core."""
    with artifact.engine(deployment=replace(artifact.manifest.deployment, devices=("cpu:0",))) as engine:
        return story(engine)


def test_split_stages_on_one_device(split: Artifact, expected: list[np.ndarray]) -> None:
    deployment = replace(split.manifest.deployment, devices=("cpu:0",), experts=("cpu:0",))
    with split.engine(deployment=deployment) as engine:
        found = story(engine)
    assert [one.tobytes() for one in found] == [other.tobytes() for other in expected]


@needs_two_cores
@pytest.mark.parametrize(
    ("devices", "experts"),
    [
        (("cpu:0", "cpu:1"), ("cpu:0", "cpu:1")),
        (("cpu:0", "cpu:1"), ("cpu:1",)),
        (("cpu:1", "cpu:0"), ("cpu:1", "cpu:0")),
    ],
)
def test_spread_experts(
    split: Artifact, expected: list[np.ndarray], devices: tuple[str, ...], experts: tuple[str, ...]
) -> None:
    deployment = replace(split.manifest.deployment, devices=devices, experts=experts)
    with split.engine(deployment=deployment) as engine:
        assert all(part.thread is not None for part in engine.parts)
        found = story(engine)
        bound = {ready.stage: ready.resident_bytes for ready in engine.ready}
    assert [one.tobytes() for one in found] == [other.tobytes() for other in expected]
    whole: Counter[str] = Counter()
    for record in split.manifest.residents:
        _, layer_id, tensor = record.key.split(".")
        if tensor.startswith("experts_"):
            whole[f"block_{int(layer_id):02d}_{EXPERTS}"] += record.num_bytes
    assert {stage: bound[stage] for stage in whole} == whole


@needs_two_cores
def test_micro_batches_that_ask_each_others_devices(split: Artifact, artifact: Artifact) -> None:
    """Both devices have layers and experts: each waits for the other while the other waits for it."""
    prompts = [IDS[start : start + 9] for start in (0, 20, 40, 60)]
    config = GenerationConfig(max_tokens=6, ignore_eos=True)
    with artifact.engine(deployment=replace(artifact.manifest.deployment, devices=("cpu:0",))) as engine:
        expected = generate_together(engine, prompts, config)
    both = ("cpu:0", "cpu:1")
    with split.engine(deployment=replace(split.manifest.deployment, devices=both, experts=both)) as engine:
        found = generate_together(engine, prompts, config)
    assert found == expected


def test_the_plan_weighs_split_stages_and_shares(split: Artifact) -> None:
    deployment = split.manifest.deployment
    plan = Plan.of(PlanRequest(facts=model_facts("tiny"), deployment=deployment, num_gpus=0))
    planned = {stage.spec.name: stage for stage in plan.stages}
    for record in split.manifest.stages:
        assert planned[record.spec.name].spec == record.spec
        assert planned[record.spec.name].data_bytes == record.data.num_bytes
    gpus = tuple(f"cuda:{number}" for number in range(3))
    spread = replace(deployment, devices=gpus, experts=gpus[:2])
    plan = Plan.of(PlanRequest(facts=model_facts("tiny"), deployment=spread, num_gpus=3))
    experts = sum(stage.expert_bytes for stage in plan.stages)
    held = [device.phases["load"]["experts"] for device in plan.devices]
    assert held == [experts // 2, experts // 2, 0]
    for device in plan.devices:
        for phase in device.phases.values():
            assert phase["total"] == sum(value for name, value in phase.items() if name != "total")


def test_experts_are_counted_by_the_model(split: Artifact) -> None:
    config: ModelConfig = split.config
    for record in split.manifest.residents:
        if ".experts_" in record.key:
            assert split.residents.array(record.key).shape[0] == config.n_routed_experts
            some = split.residents.array(record.key, range(3, 5))
            np.testing.assert_array_equal(some, split.residents.array(record.key)[3:5])
