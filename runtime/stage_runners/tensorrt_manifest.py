"""The manifest of a build: which plans there are, what they were built from and for, and where weights lie.

A build lives in `engines/<key>/` of its artefact and names the artefact's digest; it never changes files of the
export. The key names everything that decides it, so that builds for other targets or tools lie beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.artifact import FileRecord, document_digest
from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.json_file import read_json_object
from engram_trt.plugins.trt_kernels import KernelRecord

ENGINES_FOLDER = "engines"
MANIFEST_NAME = "manifest.json"
PLANS_FOLDER, KERNELS_FOLDER, WEIGHTS_FOLDER, LOGS_FOLDER = "plans", "kernels", "weights", "logs"
FORMAT = "engram-trt engines"
VERSION = 1

Range = tuple[int, int, int]
Profiles = Mapping[str, Mapping[str, Range]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """A dense weight that is bound as an input.

    Args:
        name, dtype, shape: of the binding.
        offset: in the stage's data file, or in its file of small weights.
        is_small: which of the two.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    is_small: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """One plan, which serves one or more stages.

    Args:
        key: digest of what it was built from.
        kind: of its stages.
        file: the plan, relative to the build's folder.
        profiles: by name, in the plan's order; ranges of all symbols.
        plugin_layers: op -> layers.
        facts: figures of the build: milliseconds, bytes, layers.
    """

    key: str
    kind: str
    file: FileRecord
    profiles: Profiles
    plugin_layers: Mapping[str, int]
    facts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEngine:
    """What runs one stage: its plan and its weights."""

    stage: str
    plan: str
    weights: tuple[WeightRecord, ...]
    small_weights: FileRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesManifest:
    """A build.

    Args:
        key: name of its folder.
        artifact_digest: of the artefact's manifest.
        backend, backend_version: TensorRT's module and version.
        targets: compute capabilities.
        bakes_weights: dense weights are constants of the plans.
        limits: of the deployment, by name.
        code_digest: of the sources that decide plans.
        plugins: op -> version and ABI.
        plans, stages, kernels: what is there.
    """

    key: str
    artifact_digest: str
    backend: str
    backend_version: str
    targets: tuple[int, ...]
    bakes_weights: bool
    limits: Mapping[str, int]
    code_digest: str
    plugins: Mapping[str, Mapping[str, str]]
    plans: tuple[PlanRecord, ...]
    stages: tuple[StageEngine, ...]
    kernels: tuple[KernelRecord, ...]

    def plan_of(self, stage: str) -> PlanRecord:
        """The plan that runs a stage. Raises KeyError for a stage that was not built."""
        key = {engine.stage: engine.plan for engine in self.stages}[stage]
        return {plan.key: plan for plan in self.plans}[key]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with a digest over the rest."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "key": self.key,
            "artifact_digest": self.artifact_digest,
            "backend": self.backend,
            "backend_version": self.backend_version,
            "targets": list(self.targets),
            "bakes_weights": self.bakes_weights,
            "limits": dict(self.limits),
            "code_digest": self.code_digest,
            "plugins": {op: dict(identity) for op, identity in self.plugins.items()},
            "plans": [plan_to_json(plan) for plan in self.plans],
            "stages": [_plain_stage(stage) for stage in self.stages],
            "kernels": [kernel.to_json() for kernel in self.kernels],
        }
        return {**document, "digest": document_digest(document)}

    @classmethod
    def read(cls, folder: Path) -> EnginesManifest:
        """Read the manifest of a build.

        Raises:
            ArtifactError: none there, another version, or changed by hand.
        """
        path = folder / MANIFEST_NAME
        document = read_json_object(path, ArtifactError)
        stated = document.pop("digest", None)
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise _unreadable(path, f"format {document.get('format')!r}, version {document.get('version')!r}")
        if stated != document_digest(document):
            raise _unreadable(path, "a manifest that was changed after it was written")
        try:
            return cls._from_json(document)
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, f"an entry that cannot be read ({error})") from None

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> EnginesManifest:
        return cls(
            key=document["key"],
            artifact_digest=document["artifact_digest"],
            backend=document["backend"],
            backend_version=document["backend_version"],
            targets=tuple(document["targets"]),
            bakes_weights=document["bakes_weights"],
            limits=document["limits"],
            code_digest=document["code_digest"],
            plugins=document["plugins"],
            plans=tuple(plan_from_json(item) for item in document["plans"]),
            stages=tuple(_stage(item) for item in document["stages"]),
            kernels=tuple(KernelRecord.from_json(item) for item in document["kernels"]),
        )


def find_builds(artifact: Path) -> tuple[Path, ...]:
    """Folders of an artefact's finished builds."""
    root = artifact / ENGINES_FOLDER
    return tuple(sorted(path.parent for path in root.glob(f"*/{MANIFEST_NAME}"))) if root.is_dir() else ()


def write_manifest(manifest: EnginesManifest, folder: Path) -> None:
    """Write the manifest of a finished build."""
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json(), indent=1))


def _unreadable(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        str(path), found=found, expected=f"{FORMAT!r}, version {VERSION}", remedy="Run `engram-trt build` again."
    )


def _plain_file(record: FileRecord) -> dict[str, Any]:
    return {"path": record.path, "bytes": record.num_bytes, "sha256": record.sha256}


def _file(document: Mapping[str, Any]) -> FileRecord:
    return FileRecord(path=document["path"], num_bytes=document["bytes"], sha256=document["sha256"])


def plan_to_json(plan: PlanRecord) -> dict[str, Any]:
    """Plain JSON of one plan's record."""
    profiles = {name: {s: list(r) for s, r in profile.items()} for name, profile in plan.profiles.items()}
    return {
        "key": plan.key,
        "kind": plan.kind,
        "file": _plain_file(plan.file),
        "profiles": profiles,
        "plugin_layers": dict(plan.plugin_layers),
        "facts": dict(plan.facts),
    }


def plan_from_json(document: Mapping[str, Any]) -> PlanRecord:
    """The inverse of `plan_to_json`."""
    profiles = {
        name: {symbol: (r[0], r[1], r[2]) for symbol, r in profile.items()}
        for name, profile in document["profiles"].items()
    }
    return PlanRecord(
        key=document["key"],
        kind=document["kind"],
        file=_file(document["file"]),
        profiles=profiles,
        plugin_layers=document["plugin_layers"],
        facts=document["facts"],
    )


def _plain_stage(stage: StageEngine) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "plan": stage.plan,
        "weights": [[w.name, w.dtype, list(w.shape), w.offset, w.is_small] for w in stage.weights],
        "small_weights": None if stage.small_weights is None else _plain_file(stage.small_weights),
    }


def _stage(document: Mapping[str, Any]) -> StageEngine:
    small = document["small_weights"]
    return StageEngine(
        stage=document["stage"],
        plan=document["plan"],
        weights=tuple(
            WeightRecord(name=name, dtype=dtype, shape=tuple(shape), offset=offset, is_small=is_small)
            for name, dtype, shape, offset, is_small in document["weights"]
        ),
        small_weights=None if small is None else _file(small),
    )
