"""`engram-trt build` with TensorRT-RTX on this machine: all stages of the tiny model, twice, and what goes wrong."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from engine_jobs_for_tests import BACKEND, TARGETS

from engram_trt.configs.artifact import Manifest
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, RequestError, UserError
from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.export.engines.build import BuildProgress, BuildRequest, build_engines
from engram_trt.export.pipeline import ExportRequest, export_checkpoint
from engram_trt.runtime.cli import main
from engram_trt.runtime.stage_runners.tensorrt_manifest import EnginesManifest

PLUGINS_OF_KIND = {
    "engram_hash": {"EngramHash"},
    "embedding": set(),
    "head": set(),
    "window": {"HyperConnectionMix", "CacheWrite", "SparseAttention", "MoEExperts"},
}
"""Ops of some kinds; every block has those of `window`."""


def private_copy(artifact: Path, folder: Path) -> Path:
    """The artefact without its engines, for one test."""
    target = folder / "artefact"
    shutil.copytree(artifact, target, ignore=shutil.ignore_patterns("engines"))
    return target


def build(artifact: Path, **changes: object) -> tuple[Path, EnginesManifest, bool]:
    request = BuildRequest(artifact=artifact, backend=BACKEND, targets=TARGETS, with_kernels=False)
    return build_engines(replace(request, **changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def built(
    request: pytest.FixtureRequest, tiny_artifact: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, EnginesManifest]:
    """Artefact, build folder and manifest of every stage for both targets, in one dtype."""
    folder = tmp_path_factory.mktemp(f"built_{request.param}")
    if request.param == "float32":
        artifact = private_copy(tiny_artifact, folder)
    else:
        artifact = folder / "artefact"
        deployment = Manifest.read(tiny_artifact).deployment.with_dtype("bfloat16")
        export_checkpoint(ExportRequest(checkpoint=tiny_checkpoint, out=artifact, deployment=deployment, weights=False))
    place, engines, unchanged = build(artifact)
    assert not unchanged
    return artifact, place, engines


def test_every_stage_has_a_plan_and_kinds_share_theirs(built: tuple[Path, Path, EnginesManifest]) -> None:
    artifact, place, engines = built
    manifest = Manifest.read(artifact)
    kinds = {record.spec.name: record.spec.kind for record in manifest.stages}
    assert [engine.stage for engine in engines.stages] == list(kinds)
    assert {plan.kind for plan in engines.plans} == set(kinds.values())
    assert len(engines.plans) == len(set(kinds.values()))
    assert engines.targets == TARGETS
    for plan in engines.plans:
        assert plan.file.verify(place).stat().st_size < 16 << 20
        assert (place / "logs" / f"{plan.key}.log").is_file()


def test_every_custom_op_is_a_plugin(built: tuple[Path, Path, EnginesManifest]) -> None:
    _, _, engines = built
    for plan in engines.plans:
        expected = PLUGINS_OF_KIND.get(plan.kind, PLUGINS_OF_KIND["window"])
        assert expected <= set(plan.plugin_layers), plan.kind
    found = {op for plan in engines.plans for op in plan.plugin_layers}
    assert {"EngramGather", "EngramHash", "Indexer"} <= found


def test_experts_that_are_stages_of_their_own(split_artifact: Path, tmp_path: Path) -> None:
    """One plan for any number of bound experts."""
    artifact = private_copy(split_artifact, tmp_path)
    names = ("block_02_experts", "block_02_sum", "block_03_experts")
    _, engines, _ = build(artifact, stages=names)
    kinds = {plan.kind: plan for plan in engines.plans}
    assert set(kinds) == {"experts", "sum"}
    assert kinds["experts"].plugin_layers == {"MoEExpertOutputs": 1}
    num_experts = ModelConfig.from_file(artifact / "config.json").n_routed_experts
    assert {profile["experts"] for profile in kinds["experts"].profiles.values()} == {(1, num_experts, num_experts)}


def test_profiles_are_the_deployments_limits(built: tuple[Path, Path, EnginesManifest]) -> None:
    artifact, _, engines = built
    manifest = Manifest.read(artifact)
    limits = manifest.deployment.limits
    largest = symbol_limits(ModelConfig.from_file(artifact / "config.json"), limits)
    for plan in engines.plans:
        decode, prefill = plan.profiles["decode"], plan.profiles["prefill"]
        assert decode["tokens"] == (1, 1, 1)
        assert decode["batch"] == (1, limits.max_batch, limits.max_batch)
        assert (prefill["tokens"][0], prefill["tokens"][2]) == (1, limits.max_step_tokens)
        for symbol, (low, _, high) in prefill.items():
            if symbol.startswith(("entries", "window", "state")):
                assert low == high == largest[symbol]
            elif symbol.startswith("visible"):
                assert (low, high) == (1, largest[symbol])


def test_weights_are_bound_and_can_be_found_without_onnx(built: tuple[Path, Path, EnginesManifest]) -> None:
    artifact, place, engines = built
    manifest = Manifest.read(artifact)
    data = {record.spec.name: record.data for record in manifest.stages}
    names = {weight.name: weight for engine in engines.stages for weight in engine.weights}
    assert {"embed.weight", "head.weight", "attn.wq_a.weight", "token_map"} <= set(names)
    for engine in engines.stages:
        small = 0 if engine.small_weights is None else engine.small_weights.verify(place).stat().st_size
        for weight in engine.weights:
            size = small if weight.is_small else data[engine.stage].num_bytes
            assert weight.offset < size


def test_nothing_changed_is_not_built_again(built: tuple[Path, Path, EnginesManifest]) -> None:
    artifact, place, engines = built
    again, manifest, unchanged = build(artifact)
    assert (again, unchanged) == (place, True)
    assert manifest.to_json() == engines.to_json()


def test_changed_weights_need_no_plan(built: tuple[Path, Path, EnginesManifest]) -> None:
    """The same stages under another manifest: all plans are taken over."""
    artifact, place, _ = built
    announced: list[tuple[int, int, int]] = []
    request = BuildRequest(
        artifact=artifact, backend=BACKEND, targets=TARGETS, with_kernels=False, stages=("block_00", "engram_hash")
    )
    other, _, _ = build_engines(request, BuildProgress(plan=lambda *counts: announced.append(counts)))
    assert other != place
    assert announced == [(0, 2, 0)]
    shutil.rmtree(other)


def test_baked_weights_are_in_the_plans_of_each_stage(tiny_artifact: Path, tmp_path: Path) -> None:
    """Two layers of a kind that share a plan when weights are bound; other weights then are another plan."""
    artifact = private_copy(tiny_artifact, tmp_path)
    kinds = {record.spec.name: record.spec.kind for record in Manifest.read(artifact).stages}
    twins = next((a, b) for a in kinds for b in kinds if a < b and kinds[a] == kinds[b])
    bound_place, bound, _ = build(artifact, stages=twins, targets=TARGETS[:1])
    place, baked, _ = build(artifact, stages=twins, targets=TARGETS[:1], bake_weights=True)
    assert (bound.bakes_weights, baked.bakes_weights) == (False, True)
    assert place != bound_place
    assert (len(bound.plans), len(baked.plans)) == (1, 2)
    assert baked.plans[0].file.sha256 != baked.plans[1].file.sha256
    weight_bytes = sum(math.prod(weight.shape) * ITEM_BYTES[weight.dtype] for weight in bound.stages[0].weights)
    for engine, plan in zip(baked.stages, baked.plans, strict=True):
        assert not engine.weights
        assert plan.file.num_bytes > weight_bytes
        assert set(plan.plugin_layers) == set(bound.plans[0].plugin_layers)


def test_a_damaged_plan_is_built_again(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = private_copy(tiny_artifact, tmp_path)
    place, engines, _ = build(artifact, stages=("engram_hash",))
    plan = place / engines.plans[0].file.path
    plan.write_bytes(plan.read_bytes()[:1000])
    announced: list[tuple[int, int, int]] = []
    request = BuildRequest(
        artifact=artifact, backend=BACKEND, targets=TARGETS, with_kernels=False, stages=("engram_hash",)
    )
    build_engines(request, BuildProgress(plan=lambda *counts: announced.append(counts)))
    assert announced == [(1, 0, 0)]
    assert plan.stat().st_size == engines.plans[0].file.num_bytes or plan.stat().st_size > 1000


def test_an_export_with_other_weights_keeps_the_plans(
    tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Data files are no part of a plan: the stages with weights take over the plan of those without."""
    artifact = tmp_path / "artefact"
    announced: list[tuple[int, int, int]] = []
    for weights in (False, True):
        export_checkpoint(
            ExportRequest(
                checkpoint=tiny_checkpoint,
                out=artifact,
                deployment=Manifest.read(tiny_artifact).deployment,
                weights=weights,
                stages=("head",),
            )
        )
        request = BuildRequest(artifact=artifact, backend=BACKEND, targets=TARGETS, with_kernels=False)
        _, _, unchanged = build_engines(request, BuildProgress(plan=lambda *counts: announced.append(counts)))
        assert not unchanged
    assert announced == [(1, 0, 0), (0, 1, 0)]


def test_a_changed_deployment_rebuilds(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artefact"
    for max_batch in (1, 3):
        deployment = DeploymentConfig(limits=Limits(max_batch=max_batch))
        export_checkpoint(
            ExportRequest(
                checkpoint=tiny_checkpoint, out=artifact, deployment=deployment, weights=False, stages=("engram_hash",)
            )
        )
        _, engines, unchanged = build(artifact)
        assert not unchanged
        assert engines.plans[0].profiles["decode"]["batch"][2] == max_batch


def test_two_builds_at_once_are_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = private_copy(tiny_artifact, tmp_path)
    (artifact / "engines").mkdir()
    lock = os.open(artifact / "engines" / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ArtifactError, match="another build at work"):
            build(artifact, stages=("engram_hash",))
    finally:
        os.close(lock)


def test_a_failed_build_leaves_nothing_but_its_finished_plans(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = private_copy(tiny_artifact, tmp_path)
    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="was stopped"):
        build(artifact, stages=("engram_hash",), max_seconds=0.2)
    assert not [path for path in (artifact / "engines").iterdir() if not path.name.startswith(".")]
    assert {path: path.read_bytes() for path in before} == before
    _, engines, _ = build(artifact, stages=("engram_hash",))
    assert len(engines.plans) == 1


def test_a_changed_stage_file_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = private_copy(tiny_artifact, tmp_path)
    path = artifact / "stages" / "engram_hash.onnx"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"engram_hash.onnx: found SHA-256"):
        build(artifact, stages=("engram_hash",))


def test_limits_and_stage_names_are_checked(tiny_artifact: Path) -> None:
    with pytest.raises(RequestError, match=r"--stages: found block_99"):
        build(tiny_artifact, stages=("block_99",))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "sm_90"], "'sm_90', which tensorrt_rtx cannot build for"),
        (["--target", "sm_86"], "'sm_86', which has no kernels here"),
        (["--target", "sm_89,gpu"], "'gpu', which is no target"),
        (["--target", ","], "--target: found nothing"),
        (["--target", "sm_89", "--jobs", "0"], "--jobs: found 0"),
        (["--target", "sm_89", "--max-build-memory", "-1"], "--max-build-memory"),
    ],
)
def test_wrong_options_exit_with_2(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    artifact = private_copy(tiny_artifact, tmp_path)
    assert main(["build", str(artifact), "--backend", BACKEND, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_backend_and_a_missing_artefact_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(tmp_path), "--backend", "onnxruntime"]) == 2
    assert "tensorrt or tensorrt_rtx" in capsys.readouterr().err
    assert main(["build", str(tmp_path / "none"), "--backend", BACKEND, "--target", "sm_89"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_inspect_shows_what_is_there_and_what_is_stale(
    built: tuple[Path, Path, EnginesManifest], capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, place, engines = built
    assert main(["inspect", str(artifact), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    shown = next(item for item in document["builds"] if item["engines"] == str(place))
    assert shown["stale"] == []
    assert shown["targets"] == ["sm_89", "sm_120"]
    assert sorted(name for plan in shown["plans"] for name in plan["stages"]) == sorted(
        stage["stage"] for stage in document["stages"]
    )
    block = next(stage for stage in document["stages"] if stage["stage"] == "block_00")
    assert {"name": "window_kv_out", "alias": "window_kv"}.items() <= {
        name: value for t in block["outputs"] if t["name"] == "window_kv_out" for name, value in t.items()
    }.items()
    plan = place / engines.plans[0].file.path
    aside = plan.with_suffix(".aside")
    plan.rename(aside)
    try:
        assert main(["inspect", str(artifact)]) == 0
        assert "stale: " in capsys.readouterr().out
    finally:
        aside.rename(plan)
