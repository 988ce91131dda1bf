"""Which plans a build needs: stages whose graphs, interfaces and profiles are the same share one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engram_trt.configs.artifact import Manifest, StageRecord, document_digest
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.onnx_external_data import check_external_data
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.engines.model import (
    DenseWeight,
    PluginNode,
    bind_weights,
    dense_weights,
    drop_bodies,
    model_digest,
    plugin_nodes,
    read_model,
)
from engram_trt.export.engines.profiles import Profile, stage_profiles
from engram_trt.export.passes.legality import check_legality
from engram_trt.export.sources import sources_digest

_PLAN_SOURCES = (
    "plugins/spec.py",
    "plugins/trt_*.py",
    "plugins/*/spec.py",
    "plugins/*/trt_plugin.py",
    "plugins/*/launch.py",
    "plugins/*/variants.py",
    "plugins/kernels/plan.py",
    "plugins/kernels/checks.py",
    "export/engines/*.py",
    "export/passes/legality.py",
)
_KERNEL_SOURCES = ("plugins/kernels/*.py", "plugins/*/kernel*.py", "plugins/*/launch.py", "plugins/*/variants.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage and the plan it needs."""

    record: StageRecord
    plan_key: str
    profiles: Mapping[str, Profile]
    weights: tuple[DenseWeight, ...]
    nodes: tuple[PluginNode, ...]

    @property
    def spec(self) -> StageSpec:
        return self.record.spec


@cache
def plan_code_digest() -> str:
    """SHA-256 (hex) over the sources that decide a plan."""
    return sources_digest(_PLAN_SOURCES)


@cache
def kernel_code_digest() -> str:
    """SHA-256 (hex) over the sources that decide a kernel, and the compiler's version."""
    try:
        compiler = version("triton")
    except PackageNotFoundError:
        compiler = "none"
    return hashlib.sha256(f"{sources_digest(_KERNEL_SOURCES)}|{compiler}".encode()).hexdigest()


def plan_stages(
    root: Path, manifest: Manifest, records: Sequence[StageRecord], config: ModelConfig, decisions: Mapping[str, Any]
) -> tuple[PlannedStage, ...]:
    """Read the graphs of some stages and find out which plans they need.

    Args:
        root: of the artefact.
        manifest: its manifest.
        records: the stages.
        config: the model.
        decisions: back end, version, targets and choices; part of every plan's key. `bakes_weights` is among them.

    Raises:
        ArtifactError: a stage file is damaged.
        LegalityError: a graph holds something that TensorRT refuses.
    """
    rows = table_rows(manifest)
    planned = []
    for record in records:
        path, data = record.onnx.verify(root).resolve(), record.data.locate(root).resolve()
        check_external_data(path, data)
        spec = record.spec
        model = read_model(path)
        check_legality(model, spec.name)
        weights = dense_weights(model, path, data)
        baked = bool(decisions["bakes_weights"])
        bind_weights(model, () if baked else weights)
        drop_bodies(model)
        profiles = stage_profiles(spec, config, manifest.deployment.limits, rows.get(spec.kind, ()))
        document = {
            "graph": model_digest(model),
            "data": record.data.sha256 if baked else None,
            "bindings": [[t.name, t.dtype, t.shape, t.alias] for t in (*spec.inputs, *spec.outputs)],
            "profiles": {name: dict(profile) for name, profile in profiles.items()},
            "decisions": dict(decisions),
        }
        planned.append(
            PlannedStage(
                record=record,
                plan_key=document_digest(document)[:32],
                profiles=profiles,
                weights=() if baked else weights,
                nodes=plugin_nodes(model),
            )
        )
    return tuple(planned)


def table_rows(manifest: Manifest) -> dict[str, set[int]]:
    """Kind of stage -> rows of the Engram tables its stages read."""
    shapes = {record.key: record.shape for record in manifest.residents}
    found: dict[str, set[int]] = {}
    for record in manifest.stages:
        for tensor in record.spec.inputs:
            if "table_rows" in tensor.shape:
                found.setdefault(record.spec.kind, set()).add(shapes[tensor.key][0])
    return found
