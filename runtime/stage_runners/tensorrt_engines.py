"""Find the build that fits this machine, open its plans, and hold each against the stage it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.tensors import StageSpec
from engram_trt.plugins.tensorrt_api import TensorRT
from engram_trt.plugins.trt_registration import require_same_plugins
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    EnginesManifest,
    PlanRecord,
    StageEngine,
    find_builds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBuild:
    """A build that fits: its folder and manifest."""

    folder: Path
    manifest: EnginesManifest

    def engine_of(self, stage: str) -> StageEngine:
        """Plan and weights of a stage. Raises KeyError for one that was not built."""
        return {engine.stage: engine for engine in self.manifest.stages}[stage]


def choose_build(artifact: Path, digest: str, stages: Sequence[str], api: TensorRT, sm: int) -> OpenBuild:
    """The build of an artefact that this TensorRT, this code and this GPU can run.

    Args:
        artifact: folder of the artefact.
        digest: of its manifest.
        stages: names that must be there.
        api: the loaded TensorRT.
        sm: compute capability of the GPU.

    Raises:
        ArtifactError: there is none, or the closest one was built for something else: it is said for what.
    """
    refusals: list[tuple[int, ArtifactError]] = []
    for folder in find_builds(artifact):
        manifest = EnginesManifest.read(folder)
        if manifest.backend != api.backend:
            continue
        refusal = _refusal(folder, manifest, digest, stages, api, sm)
        if refusal is None:
            require_same_plugins(str(folder), manifest.plugins)
            return OpenBuild(folder=folder, manifest=manifest)
        refusals.append(refusal)
    if refusals:
        raise max(refusals, key=lambda item: item[0])[1]
    raise ArtifactError(
        str(artifact),
        found=f"no engines for {api.backend}",
        expected="a build for this machine",
        remedy=f"Run `engram-trt build {artifact} --backend {api.backend}`.",
    )


def _refusal(
    folder: Path, manifest: EnginesManifest, digest: str, stages: Sequence[str], api: TensorRT, sm: int
) -> tuple[int, ArtifactError] | None:
    """Why a build does not fit, and how many of the checks it passed."""
    targets = ", ".join(f"sm_{target}" for target in manifest.targets)
    missing = [name for name in stages if name not in {engine.stage for engine in manifest.stages}]
    checks = (
        (manifest.artifact_digest == digest, "engines of an earlier export", "engines of this artefact"),
        (not missing, f"no engines for {', '.join(missing)}", "all stages of the artefact"),
        (
            manifest.backend_version == api.version,
            f"engines of {api.backend} {manifest.backend_version}",
            f"engines of the installed version {api.version}",
        ),
        (sm in manifest.targets, f"engines for {targets}", f"engines for sm_{sm}, the GPU of this machine"),
    )
    for passed, (holds, found, expected) in enumerate(checks):
        if not holds:
            remedy = "Run `engram-trt build` again on this machine."
            return passed, ArtifactError(str(folder), found=found, expected=expected, remedy=remedy)
    return None


def open_engine(api: TensorRT, runtime: Any, build: OpenBuild, plan: PlanRecord) -> Any:
    """Deserialize a plan; the device must be current.

    Raises:
        ArtifactError: the file is missing, damaged, or TensorRT refuses it.
    """
    path = plan.file.verify(build.folder)
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise ArtifactError(
            str(path),
            found="a plan that TensorRT cannot open",
            expected=f"a plan of {api.backend} {api.version} for this GPU",
            remedy="Run `engram-trt build` again on this machine.",
        )
    return engine


def check_engine(api: TensorRT, engine: Any, spec: StageSpec, built: StageEngine, plan: PlanRecord) -> None:
    """Names, modes, dtypes, shapes, aliases and profiles of an opened engine against the stage.

    Raises:
        ArtifactError: naming the binding.
    """
    trt = api.module
    inputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in spec.inputs}
    inputs |= {weight.name: (weight.dtype, weight.shape) for weight in built.weights}
    outputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in spec.outputs}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    odd = sorted(set(names) ^ (inputs.keys() | outputs.keys()))
    if odd:
        raise _differs(spec, "bindings", f"a difference in {', '.join(odd)}", "the stage's names")
    for name in names:
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        if is_input != (name in inputs):
            raise _differs(spec, name, "an input" if is_input else "an output", "the other")
        dtype, shape = (inputs if is_input else outputs)[name]
        found = api.dtype_name(engine.get_tensor_dtype(name))
        if found != dtype:
            raise _differs(spec, name, found, dtype)
        extents = tuple(engine.get_tensor_shape(name))
        # A symbol whose range is one value is that value in the engine.
        fits = len(extents) == len(shape) and all(
            isinstance(wanted, str) or given == wanted for given, wanted in zip(extents, shape, strict=False)
        )
        if not fits:
            raise _differs(spec, name, f"shape {list(extents)}", f"{list(shape)}")
    for tensor in spec.outputs:
        source = engine.get_aliased_input_tensor(tensor.name) or None
        if source != tensor.alias:
            raise _differs(spec, tensor.name, f"alias of {source}", f"alias of {tensor.alias}")
    if engine.num_optimization_profiles != len(plan.profiles):
        raise _differs(spec, "profiles", str(engine.num_optimization_profiles), str(len(plan.profiles)))


def _differs(spec: StageSpec, binding: str, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"engine of {spec.name}: {binding}",
        found=found,
        expected=expected,
        remedy="Plan and manifest do not belong together: run `engram-trt build` again.",
    )
