"""Builder jobs for single ONNX files, run in a process as `engram-trt build` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx

from engram_trt.configs.artifact import Manifest
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.engines.jobs import EngineJob, job_folder
from engram_trt.export.engines.plans import table_rows
from engram_trt.export.engines.pool import BuildPool, PoolLimits
from engram_trt.export.engines.process import Finished
from engram_trt.export.engines.profiles import stage_profiles

BACKEND = "tensorrt_rtx"
TARGETS = (89, 120)


def pool_in(folder: Path, *, memory_bytes: int = 3 << 30, seconds: float = 120.0) -> BuildPool:
    """A pool whose work folder is `folder`."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    limits = PoolLimits.choose(jobs=1, memory_bytes=memory_bytes, seconds=seconds)
    return BuildPool(BACKEND, folder, folder, limits, bake_weights=False)


def stage_job(
    artifact: Path, stage: str, folder: Path, change: Callable[[onnx.ModelProto], None] | None = None
) -> EngineJob:
    """A job for one stage of an artefact, its graph changed or not."""
    manifest = Manifest.read(artifact)
    record = next(record for record in manifest.stages if record.spec.name == stage)
    path = artifact / record.onnx.path
    place = job_folder(folder, "job")
    if change is not None:
        model = onnx.load(path, load_external_data=False)
        change(model)
        path = place / "changed.onnx"
        path.write_bytes(model.SerializeToString())
    config = ModelConfig.from_file(artifact / "config.json")
    rows = table_rows(manifest).get(record.spec.kind, ())
    return EngineJob(
        backend=BACKEND,
        stage=record.spec,
        onnx=str(path),
        data=str(artifact / record.data.path),
        targets=(120,),
        profiles=stage_profiles(record.spec, config, manifest.deployment.limits, rows),
        bake_weights=False,
        folder=str(place),
    )


def with_output(spec: StageSpec, name: str, **changes: object) -> StageSpec:
    """The spec with one output changed."""
    outputs = tuple(replace(t, **changes) if t.name == name else t for t in spec.outputs)  # type: ignore[arg-type]
    return replace(spec, outputs=outputs)


def with_input(spec: StageSpec, name: str, **changes: object) -> StageSpec:
    """The spec with one input changed."""
    inputs = tuple(replace(t, **changes) if t.name == name else t for t in spec.inputs)  # type: ignore[arg-type]
    return replace(spec, inputs=inputs)


def run_job(pool: BuildPool, job: EngineJob) -> Finished:
    """Build; raises BuildError."""
    return pool.build(job)[0]
