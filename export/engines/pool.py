"""Builders at work: which jobs run, how many at once, and what each may use."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.artifact import FileRecord
from engram_trt.configs.errors import RequestError
from engram_trt.export.engines.jobs import LOG_NAME, PLAN_NAME, RESULT_NAME, EngineJob, job_folder
from engram_trt.export.engines.kernels import kernel_key, needed_variants, variant_to_json
from engram_trt.export.engines.network import BuildError
from engram_trt.export.engines.plans import PlannedStage
from engram_trt.export.engines.process import Finished, Limits, run_limited
from engram_trt.export.engines.store import EngineStore, plan_file
from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.tensorrt_api import TENSORRT, parser_environment
from engram_trt.plugins.trt_kernels import KernelRecord
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    ENGINES_FOLDER,
    KERNELS_FOLDER,
    LOGS_FOLDER,
    PlanRecord,
)

WORKER, COMPILER = "engram_trt.export.engines.worker", "engram_trt.export.engines.kernels"

_GIB = 1 << 30
_BYTES_PER_BUILDER = 2 * _GIB
_SHARE_OF_FREE = 0.8
_KERNELS_PER_JOB = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How many builders run at once, and what each may use."""

    jobs: int
    each: Limits

    @classmethod
    def choose(cls, *, jobs: int | None, memory_bytes: int | None, seconds: float) -> PoolLimits:
        """Divide memory among builders.

        Args:
            jobs: builders at a time; None for one per core, as far as memory allows.
            memory_bytes: for all together; None for most of what is free.
            seconds: of one builder.

        Raises:
            RequestError: a limit that is not positive.
        """
        for option, value in (("--jobs", jobs), ("--max-build-memory", memory_bytes), ("time limit", seconds)):
            if value is not None and value <= 0:
                raise RequestError(option, found=str(value), expected="more than 0", remedy="Raise it.")
        memory = memory_bytes or int(_free_bytes() * _SHARE_OF_FREE)
        count = jobs or max(1, min(os.cpu_count() or 1, memory // _BYTES_PER_BUILDER))
        return cls(jobs=count, each=Limits(memory_bytes=memory // count, seconds=seconds))


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * _GIB


class BuildPool:
    """Runs the jobs of one build.

    Args:
        backend: TensorRT's module name.
        root: of the artefact.
        work: folder of the build.
        limits: of the builders.
        bake_weights: keep dense weights as constants.
    """

    def __init__(self, backend: str, root: Path, work: Path, limits: PoolLimits, bake_weights: bool) -> None:
        self.backend, self.root, self.work, self.limits = backend, root, work, limits
        self.bake_weights = bake_weights
        libraries = work / "lib"
        libraries.mkdir(exist_ok=True)
        self._environment: Mapping[str, str] = parser_environment(backend, libraries)
        self._stop = threading.Event()

    def run(
        self,
        stages: Sequence[PlannedStage],
        targets: tuple[int, ...],
        store: EngineStore,
        announce: Callable[[int, int, int], None],
        done: Callable[[str, float, int], None],
        kernel_code: str | None,
    ) -> tuple[tuple[PlanRecord, ...], tuple[KernelRecord, ...]]:
        """Build and compile what is missing.

        Args:
            stages: what plans are for.
            targets: compute capabilities.
            store: has what is there already, and is told of each plan.
            announce: plans to build, plans taken over, kernels to compile.
            done: name, seconds and peak bytes of each job.
            kernel_code: digest of the kernels' sources; None to compile none.

        Raises:
            UserError: of the first job that failed; the others are stopped.
        """
        first = {stage.plan_key: stage for stage in reversed(stages)}
        plans = {key: store.find_plan(key) for key in first}
        missing = [stage for key, stage in first.items() if plans[key] is None]
        keys = self._kernel_keys(stages, targets, kernel_code)
        kernels = {key: store.find_kernel(key) for key in keys}
        uncompiled = [key for key, record in kernels.items() if record is None]
        announce(len(missing), len(first) - len(missing), len(uncompiled))
        chunks = [uncompiled[i : i + _KERNELS_PER_JOB] for i in range(0, len(uncompiled), _KERNELS_PER_JOB)]
        # Production TensorRT may time plugins on the GPU, so their kernels come first there.
        first_wave = [self._compile_job(chunk, keys, index) for index, chunk in enumerate(chunks)]
        builds = [self._build_job(stage, targets, store) for stage in sorted(missing, key=lambda s: -len(s.nodes))]
        waves = [first_wave, builds] if self.backend == TENSORRT else [[*builds, *first_wave]]
        for wave in waves:
            self._run_wave(wave, done)
        found_plans = {key: store.find_plan(key) for key in first}
        found_kernels = {key: store.find_kernel(key) for key in keys}
        return (
            tuple(record for record in found_plans.values() if record is not None),
            tuple(record for record in found_kernels.values() if record is not None),
        )

    def _run_wave(self, jobs: Sequence[_Job], done: Callable[[str, float, int], None]) -> None:
        with ThreadPoolExecutor(max_workers=self.limits.jobs) as pool:
            futures: dict[Future[Finished], str] = {pool.submit(job.run): job.name for job in jobs}
            try:
                for future in as_completed(futures):
                    finished = future.result()
                    done(futures[future], finished.seconds, finished.peak_bytes)
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _kernel_keys(
        self, stages: Sequence[PlannedStage], targets: tuple[int, ...], code: str | None
    ) -> dict[str, tuple[int, Variant]]:
        if code is None:
            return {}
        nodes = [(node, _stage_dtype(stage)) for stage in stages for node in stage.nodes]
        return {kernel_key(variant, sm, code): (sm, variant) for sm, variant in needed_variants(nodes, targets)}

    def _compile_job(self, keys: Sequence[str], variants: Mapping[str, tuple[int, Variant]], index: int) -> _Job:
        name = f"kernels_{index}"

        def run() -> Finished:
            folder = job_folder(self.work / "jobs", name)
            kernels = [
                {"key": key, "sm": variants[key][0], "variant": variant_to_json(variants[key][1])} for key in keys
            ]
            job = {"folder": str(self.work / KERNELS_FOLDER), "kernels": kernels}
            finished = self._run(COMPILER, job, folder, f"kernels {index + 1}")
            if finished.code != 0:
                raise _crashed(f"kernels {index + 1}", finished, folder / "output.txt")
            return finished

        return _Job(f"kernels {index + 1} ({len(keys)})", run)

    def _build_job(self, stage: PlannedStage, targets: tuple[int, ...], store: EngineStore) -> _Job:
        def run() -> Finished:
            folder = job_folder(self.work / "jobs", stage.plan_key)
            job = EngineJob(
                backend=self.backend,
                stage=stage.spec,
                onnx=str((self.root / stage.record.onnx.path).resolve()),
                data=str((self.root / stage.record.data.path).resolve()),
                targets=targets,
                profiles=stage.profiles,
                bake_weights=self.bake_weights,
                folder=str(folder),
                timing_cache=self._timing_cache(stage),
                kernels=str(self.work / KERNELS_FOLDER) if self.backend == TENSORRT else None,
            )
            finished, result = self.build(job)
            store.add_plan(self._take(stage, folder, finished, result))
            return finished

        return _Job(f"{stage.spec.kind} ({stage.spec.name})", run)

    def build(self, job: EngineJob) -> tuple[Finished, Mapping[str, Any]]:
        """Run one builder and read what it reports.

        Raises:
            BuildError: it was stopped at a limit, crashed, or found the stage at fault.
        """
        folder, name = Path(job.folder), job.stage.name
        finished = self._run(WORKER, job.to_json(), folder, name)
        log = folder / LOG_NAME
        if log.is_file():
            shutil.copyfile(log, self.work / LOGS_FOLDER / f"{folder.name}.log")
        result_file = folder / RESULT_NAME
        if not result_file.is_file():
            raise _crashed(name, finished, folder / "output.txt")
        result = json.loads(result_file.read_text())
        if "error" in result:
            raise BuildError(result["error"].pop("where"), **result["error"])
        return finished, result["built"]

    def _run(self, module: str, job: Mapping[str, Any], folder: Path, name: str) -> Finished:
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        finished = run_limited(
            module, [str(path)], folder / "output.txt", self.limits.each, self._environment, self._stop.is_set
        )
        if finished.outcome in ("memory", "time"):
            raise _over_limit(name, finished, self.limits.each)
        return finished

    def _take(self, stage: PlannedStage, folder: Path, finished: Finished, result: Mapping[str, Any]) -> PlanRecord:
        path = plan_file(self.work, stage.plan_key)
        (folder / PLAN_NAME).replace(path)
        facts = {
            name: result[name] for name in ("num_layers", "plan_layers", "parse_ms", "build_ms", "activation_bytes")
        }
        return PlanRecord(
            key=stage.plan_key,
            kind=stage.spec.kind,
            file=FileRecord.of(self.work, path),
            profiles=stage.profiles,
            plugin_layers=result["plugin_layers"],
            facts={**facts, "peak_bytes": finished.peak_bytes},
        )

    def _timing_cache(self, stage: PlannedStage) -> str | None:
        if self.backend != TENSORRT:
            return None
        folder = self.root / ENGINES_FOLDER / "timing"
        folder.mkdir(exist_ok=True)
        return str(folder / f"{stage.spec.name if self.bake_weights else stage.spec.kind}.cache")


@dataclass(frozen=True, slots=True)
class _Job:
    """A name for messages, and what to do."""

    name: str
    run: Callable[[], Finished]


def _stage_dtype(stage: PlannedStage) -> str:
    floats = [t.dtype for t in (*stage.spec.inputs, *stage.spec.outputs) if t.name.startswith("hidden_states")]
    return floats[0] if floats else "float32"


def _over_limit(name: str, finished: Finished, limits: Limits) -> BuildError:
    if finished.outcome == "memory":
        found = f"a builder that took {finished.peak_bytes / _GIB:.1f} GiB and was stopped"
        expected, remedy = f"at most {limits.memory_bytes / _GIB:.1f} GiB", "Raise --max-build-memory or lower --jobs."
    else:
        found = f"a builder that ran for {finished.seconds:.0f} s and was stopped"
        expected, remedy = f"at most {limits.seconds:.0f} s", "Raise --max-build-minutes."
    return BuildError(name, found=found, expected=expected, remedy=f"{remedy} Other stages are not affected.")


def _crashed(name: str, finished: Finished, output: Path) -> BuildError:
    text = output.read_text(errors="replace").strip()[-1500:] if output.is_file() else ""
    return BuildError(
        name,
        found=f"a builder that ended with status {finished.code}: {text or 'no message'}",
        expected="a plan",
        remedy="This is a fault of the builder or of this package: keep the log.",
    )
