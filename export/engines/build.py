"""From an artefact's stages to TensorRT plans: find what is missing, build it in processes, publish the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram_trt.configs.artifact import FileRecord, Manifest, StageRecord, document_digest
from engram_trt.configs.errors import RequestError
from engram_trt.configs.model import ModelConfig
from engram_trt.export.engines.plans import PlannedStage, kernel_code_digest, plan_code_digest, plan_stages
from engram_trt.export.engines.pool import BuildPool, PoolLimits
from engram_trt.export.engines.store import EngineStore, engines_lock
from engram_trt.plugins.tensorrt_api import load
from engram_trt.plugins.trt_registration import plugin_identities
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    WEIGHTS_FOLDER,
    EnginesManifest,
    StageEngine,
    WeightRecord,
    write_manifest,
)

_SMALL_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build.

    Args:
        artifact: folder of an export.
        backend: TensorRT's module name.
        targets: compute capabilities.
        stages: names; None for all.
        bake_weights: keep dense weights as constants of the plans.
        jobs: builders at a time; None for as many as cores and memory allow.
        max_memory_bytes: for all builders together; None for most of what is free.
        max_seconds: of one builder.
        with_kernels: compile kernels too; False only where nothing will be run.
    """

    artifact: Path
    backend: str
    targets: tuple[int, ...]
    stages: tuple[str, ...] | None = None
    bake_weights: bool = False
    jobs: int | None = None
    max_memory_bytes: int | None = None
    max_seconds: float = 900.0
    with_kernels: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """Callbacks of a build, called from the thread that builds.

    Args:
        plan: plans to build, plans taken over, kernels to compile; once.
        done: something is ready: its name, seconds, peak bytes.
    """

    plan: Callable[[int, int, int], None] = lambda plans, reused, kernels: None
    done: Callable[[str, float, int], None] = lambda name, seconds, peak_bytes: None


def build_engines(request: BuildRequest, progress: BuildProgress | None = None) -> tuple[Path, EnginesManifest, bool]:
    """Build what is missing; the build's folder appears complete or not at all.

    Plans that other builds of the artefact hold are taken over; a stopped build continues where it was.

    Returns:
        the build's folder, its manifest, and whether it was there already.

    Raises:
        UserError: no artefact, a stage TensorRT refuses, a builder beyond its limits, another build at work, or a
            disk that refuses. Finished builds stay as they are.
    """
    progress = progress or BuildProgress()
    root = request.artifact
    manifest = Manifest.read(root)
    records = _chosen(manifest, request)
    api = load(request.backend)
    decisions = {
        "backend": request.backend,
        "version": api.version,
        "targets": list(request.targets),
        "bakes_weights": request.bake_weights,
        "code": plan_code_digest(),
    }
    names = [record.spec.name for record in records]
    kernels = kernel_code_digest() if request.with_kernels else None
    key = document_digest({**decisions, "artifact": manifest.digest, "stages": names, "kernels": kernels})[:16]
    with engines_lock(root):
        store = EngineStore(root, key)
        finished = store.finished()
        if finished is not None:
            return store.folder, finished, True
        config = ModelConfig.from_file(root / "config.json")
        stages = plan_stages(root, manifest, records, config, decisions)
        with store.work() as work:
            pool = BuildPool(request.backend, root, work, _limits(request), request.bake_weights)
            plans, compiled = pool.run(stages, request.targets, store, progress.plan, progress.done, kernels)
            engines = EnginesManifest(
                key=key,
                artifact_digest=manifest.digest,
                backend=request.backend,
                backend_version=api.version,
                targets=request.targets,
                bakes_weights=request.bake_weights,
                limits=manifest.deployment.to_dict()["limits"],
                code_digest=plan_code_digest(),
                plugins=plugin_identities(),
                plans=plans,
                stages=tuple(_stage_engine(stage, work) for stage in stages),
                kernels=compiled,
            )
            write_manifest(engines, work)
        return store.folder, engines, False


def _chosen(manifest: Manifest, request: BuildRequest) -> tuple[StageRecord, ...]:
    if request.stages is None:
        return manifest.stages
    known = [record.spec.name for record in manifest.stages]
    unknown = sorted(set(request.stages) - set(known))
    if unknown or not request.stages:
        raise RequestError(
            "--stages",
            found=", ".join(unknown) or "no names",
            expected=f"names out of {', '.join(known)}",
            remedy="Name stages of the artefact.",
        )
    return tuple(record for record in manifest.stages if record.spec.name in request.stages)


def _limits(request: BuildRequest) -> PoolLimits:
    return PoolLimits.choose(jobs=request.jobs, memory_bytes=request.max_memory_bytes, seconds=request.max_seconds)


def _stage_engine(stage: PlannedStage, work: Path) -> StageEngine:
    """Small weights go into a file beside the plans: the runtime reads no ONNX."""
    content = bytearray()
    weights = []
    for weight in stage.weights:
        is_small = weight.offset is None
        offset = weight.offset or 0
        if is_small:
            content.extend(bytes(-len(content) % _SMALL_ALIGNMENT))
            offset = len(content)
            content.extend(weight.inline)
        weights.append(
            WeightRecord(name=weight.name, dtype=weight.dtype, shape=weight.shape, offset=offset, is_small=is_small)
        )
    small = None
    if content:
        path = work / WEIGHTS_FOLDER / f"{stage.spec.name}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        small = FileRecord.of(work, path)
    return StageEngine(stage=stage.spec.name, plan=stage.plan_key, weights=tuple(weights), small_weights=small)
