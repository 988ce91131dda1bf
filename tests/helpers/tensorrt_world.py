"""An artefact with a TensorRT build that fits a recorded GPU, and a listener to what the runner logs."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cuda_recorder import RecordedDriver
from fake_tensorrt import FakeEngine, FakeTensorRT

from engram_trt.configs.artifact import FileRecord
from engram_trt.configs.limits import symbol_limits
from engram_trt.configs.tensors import StageSpec
from engram_trt.plugins import trt_registration
from engram_trt.plugins.tensorrt_api import TensorRT
from engram_trt.plugins.trt_registration import plugin_identities
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.tensorrt import TensorRTBackend
from engram_trt.runtime.stage_runners.tensorrt_engines import choose_build
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    EnginesManifest,
    PlanRecord,
    StageEngine,
    WeightRecord,
    write_manifest,
)

SM = 90
KEY = "0123456789abcdef"
WEIGHT = WeightRecord(name="some.weight", dtype="float32", shape=(4,), offset=0, is_small=True)


@dataclass
class World:
    """An artefact with a build that fits a recorded GPU."""

    artifact: Artifact
    root: Path
    recorder: RecordedDriver
    module: FakeTensorRT
    api: TensorRT

    @property
    def folder(self) -> Path:
        return self.root / "engines" / KEY

    def change(self, **changes: object) -> None:
        """Rewrite the build's manifest."""
        write_manifest(replace(EnginesManifest.read(self.folder), **changes), self.folder)  # type: ignore[arg-type]

    def choose(self) -> None:
        stages = [spec.name for spec in self.artifact.stages]
        choose_build(self.root, self.artifact.manifest.digest, stages, self.api, SM)

    def backend(self, ordinal: int = 0) -> TensorRTBackend:
        driver = CudaDriver(self.recorder, ordinal)
        stages = [spec.name for spec in self.artifact.stages]
        build = choose_build(self.root, self.artifact.manifest.digest, stages, self.api, driver.compute_capability)
        files = {r.spec.name: self.root / r.data.path for r in self.artifact.manifest.stages}
        return TensorRTBackend(self.api, driver, build, files, self.artifact.resident)

    def engine(self) -> Engine:
        artifact = self.artifact
        return Engine.load(artifact.config, artifact.manifest.deployment, artifact.stages, self.backend())


def ranges(spec: StageSpec, sizes: dict[str, int], tokens: int, batch: int) -> dict[str, tuple[int, int, int]]:
    found = {}
    for symbol in {e for t in spec.inputs for e in t.shape if isinstance(e, str)}:
        high = {"tokens": tokens, "selected": tokens, "batch": batch, "table_rows": 1 << 40}.get(
            symbol, sizes.get(symbol, 0)
        )
        found[symbol] = (1, high, high)
    return found


def make_world(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    root = tmp_path / "artefact"
    shutil.copytree(tiny_artifact, root, ignore=shutil.ignore_patterns("engines"))
    artifact = Artifact.open(root)
    folder = root / "engines" / KEY
    for name in ("plans", "kernels", "weights"):
        (folder / name).mkdir(parents=True)
    (folder / "weights" / "small.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    recorder = RecordedDriver(sm=SM)
    limits = artifact.manifest.deployment.limits
    sizes = symbol_limits(artifact.config, limits)
    engines, plans = {}, {}
    for record in artifact.manifest.stages:
        spec = record.spec
        if spec.kind in plans:
            continue
        path = folder / "plans" / f"{spec.kind}.plan"
        path.write_bytes(f"plan of {spec.kind}".encode())
        engines[path.read_bytes()] = FakeEngine(spec, [(WEIGHT.name, WEIGHT.dtype, WEIGHT.shape)], recorder)
        plans[spec.kind] = PlanRecord(
            key=spec.kind,
            kind=spec.kind,
            file=FileRecord.of(folder, path),
            profiles={
                "decode": ranges(spec, sizes, 1, limits.max_batch),
                "prefill": ranges(spec, sizes, limits.max_step_tokens, limits.max_batch),
            },
            plugin_layers={},
            facts={},
        )
    small = FileRecord.of(folder, folder / "weights" / "small.bin")
    manifest = EnginesManifest(
        key=KEY,
        artifact_digest=artifact.manifest.digest,
        backend="tensorrt",
        backend_version=FakeTensorRT.__version__,
        targets=(SM,),
        bakes_weights=False,
        limits={},
        code_digest="0",
        plugins=plugin_identities(),
        plans=tuple(plans.values()),
        stages=tuple(
            StageEngine(stage=r.spec.name, plan=r.spec.kind, weights=(WEIGHT,), small_weights=small)
            for r in artifact.manifest.stages
        ),
        kernels=(),
    )
    write_manifest(manifest, folder)
    module = FakeTensorRT(engines)
    monkeypatch.setattr(trt_registration, "_hosts", {})
    return World(artifact, root, recorder, module, TensorRT("tensorrt", module, FakeTensorRT.__version__))


class Listener(logging.Handler):
    """Keeps messages. pytest's own log capture is off: it makes torch's tracing log every step."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
