"""From a checkpoint to an artefact: stages, resident weights, then the manifest. Killed at any point, it resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engram_trt.configs.artifact import FileRecord, Manifest, ResidentRecord, StageRecord
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import RequestError
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.atomic_folder import copy_durably
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.graph_pool import trace_kinds
from engram_trt.export.graph_store import GraphStore, default_folder
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.provenance import stage_inputs_digest, tool_versions
from engram_trt.export.residents import (
    Resident,
    copy_resident,
    read_resident,
    residents_of,
    source_digest,
)
from engram_trt.export.stage_pool import write_stages
from engram_trt.export.stage_records import StageStore
from engram_trt.export.stages.chain import stage_specs
from engram_trt.export.work_folder import require_space, work_folder
from engram_trt.export.write_limits import WriteLimits
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

COPIED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export.

    Args:
        checkpoint: folder in the released layout.
        out: folder to publish the artefact at.
        deployment: numerics and limits.
        stages: names of stages; None for all that the checkpoint holds.
        layers: blocks of these layers only, for a trial; only their shards need to be there.
        weights: False writes data files of zeros and reads no weight.
        copy_experts: the artefact gets its own copy of the experts, stacked as they are bound.
        limits: processes and memory.
    """

    checkpoint: Path
    out: Path
    deployment: DeploymentConfig
    stages: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    weights: bool = True
    copy_experts: bool = False
    limits: WriteLimits = field(default_factory=WriteLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Callbacks of a long export.

    Args:
        plan: total weight bytes and number of stages, once.
        traced: a kind of stage has its graph.
        written: weight bytes just written or digested.
        stage: a stage is complete; True if it was there already.
    """

    plan: Callable[[int, int], None] = lambda num_bytes, num_stages: None
    traced: Callable[[str], None] = lambda kind: None
    written: Callable[[int], None] = lambda num_bytes: None
    stage: Callable[[str, bool], None] = lambda name, reused: None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExport:
    """A request with its checkpoint opened: which stages there are and what they are made from."""

    request: ExportRequest
    checkpoint: Checkpoint
    token_map: TokenMap | None
    exporter: StageExporter
    specs: tuple[StageSpec, ...]
    residents: tuple[Resident, ...]

    @classmethod
    def open(cls, request: ExportRequest, graphs: GraphStore | None = None) -> OpenExport:
        """Open and check everything; no weight is read.

        Raises:
            UserError: the checkpoint or the deployment does not allow it.
        """
        checkpoint = Checkpoint.open(request.checkpoint, layers=request.layers)
        request.deployment.require_fits(checkpoint.config)
        token_map = _token_map(checkpoint, request)
        ids = None if token_map is None else torch.from_numpy(token_map.ids.copy())
        compute = ComputeConfig.from_deployment(request.deployment)
        source = CheckpointSource(checkpoint=checkpoint)
        specs = _chosen(request, checkpoint, compute)
        return cls(
            request=request,
            checkpoint=checkpoint,
            token_map=token_map,
            exporter=StageExporter(source, compute, ids, graphs or GraphStore(default_folder())),
            specs=specs,
            residents=residents_of(checkpoint, specs, copy_experts=request.copy_experts),
        )

    def inputs_digest(self, spec: StageSpec) -> str:
        """Of what a stage's files are made from."""
        return stage_inputs_digest(
            spec,
            self.request.deployment,
            self.checkpoint,
            self.token_map.digest if self.token_map else None,
            self.exporter.stored_names(spec),
            weights=self.request.weights,
        )

    def data_bytes(self, spec: StageSpec) -> int:
        """Weight bytes of a stage's data file."""
        return sum(weight.num_bytes for weight in self.exporter.weights(spec).values())

    def manifest(
        self, stages: Sequence[StageRecord], residents: Sequence[ResidentRecord], files: Sequence[FileRecord]
    ) -> Manifest:
        """The manifest of the finished artefact."""
        return Manifest(
            model_digest=self.checkpoint.config.digest(),
            deployment=self.request.deployment,
            has_weights=self.request.weights,
            checkpoint_path=str(self.checkpoint.root),
            checkpoint_digest=self.checkpoint.header_digest,
            token_map_sha256=self.token_map.digest if self.token_map else None,
            tools=tool_versions(),
            stages=tuple(stages),
            residents=tuple(residents),
            files=tuple(files),
            layers=self.request.layers,
        )


def export_checkpoint(
    request: ExportRequest, progress: Progress | None = None, graphs: GraphStore | None = None
) -> Manifest:
    """Export a checkpoint; the artefact appears at `request.out` complete or not at all.

    Stages and copies are written to a work folder beside `out` and recorded one by one, so that a second run
    continues where a killed one stopped, and takes over what has not changed from an older artefact.

    Args:
        request: what to export.
        progress: callbacks.
        graphs: where traced graphs are kept; the user's cache folder by default.

    Raises:
        UserError: the checkpoint, the deployment or the disk does not allow it. What was there stays.
    """
    progress = progress or Progress()
    export = OpenExport.open(request, graphs)
    with work_folder(request.out) as work:
        store = StageStore(work, request.out)
        digests = {spec.name: export.inputs_digest(spec) for spec in export.specs}
        stages = {spec.name: record for spec in export.specs if (record := store.find(spec.name, digests[spec.name]))}
        missing = [spec for spec in export.specs if spec.name not in stages]
        residents = {item.key: known for item in export.residents if (known := _known(export, store, item))}
        unread = [item for item in export.residents if item.key not in residents]
        _announce(export, work, missing, unread, progress)
        for name in stages:
            progress.stage(name, True)
        trace_kinds(export.exporter, missing, progress.traced, request.limits.tracers())
        for spec, files in write_stages(
            export.exporter,
            export.checkpoint,
            request.layers,
            missing,
            store.stages,
            request.limits,
            progress.written,
            zeros=not request.weights,
        ):
            stages[spec.name] = store.add(spec, digests[spec.name], files)
            progress.stage(spec.name, False)
        for item in unread:
            residents[item.key] = _read(export, store, item, progress.written)
        manifest = export.manifest(
            [stages[spec.name] for spec in export.specs],
            [residents[item.key] for item in export.residents],
            copy_files(export.checkpoint, work),
        )
        store.publish(manifest)
    return manifest


def _known(export: OpenExport, store: StageStore, resident: Resident) -> ResidentRecord | None:
    """What an earlier run recorded; without weights, and with nothing to copy, there is nothing to read."""
    if not export.request.weights and not resident.copied:
        return resident.record(None, None, None)
    source = source_digest(export.checkpoint, resident) if export.request.weights else None
    return store.find_resident(resident.key, source, copied=resident.copied)


def _read(export: OpenExport, store: StageStore, resident: Resident, progress: Callable[[int], None]) -> ResidentRecord:
    """Digest a resident tensor, and copy it if it is to be."""
    weights, path = export.request.weights, store.residents / resident.file_name
    source = source_digest(export.checkpoint, resident) if weights else None
    if resident.copied:
        sha256 = copy_resident(export.checkpoint, resident, path, progress, zeros=not weights)
        copy = FileRecord.of(store.work, path, sha256)
        record = resident.record(sha256 if weights else None, source, copy)
    else:
        record = resident.record(read_resident(export.checkpoint, resident, progress), source, None)
    store.add_resident(record)
    return record


def _announce(
    export: OpenExport, work: Path, missing: Sequence[StageSpec], unread: Sequence[Resident], progress: Progress
) -> None:
    """Say how much there is to do, and refuse what the disk has no room for."""
    dense = sum(map(export.data_bytes, missing))
    copied = sum(resident.num_bytes for resident in unread if resident.copied)
    if export.request.weights:
        require_space(work, dense + copied)
    progress.plan(dense + sum(resident.num_bytes for resident in unread), len(export.specs))


def _chosen(request: ExportRequest, checkpoint: Checkpoint, compute: ComputeConfig) -> tuple[StageSpec, ...]:
    specs = stage_specs(
        checkpoint.config,
        compute,
        packed_experts=True,
        dspark_taps=request.deployment.dspark_taps,
        split_experts=bool(request.deployment.experts),
        layers=request.layers if request.layers is not None else checkpoint.partial_layers,
    )
    if request.stages is None:
        return specs
    names = [spec.name for spec in specs]
    unknown = sorted(set(request.stages) - set(names))
    if unknown:
        raise RequestError(
            "--stages",
            found=", ".join(unknown),
            expected=f"names out of {', '.join(names)}",
            remedy="Name stages that this checkpoint holds.",
        )
    return tuple(spec for spec in specs if spec.name in request.stages)


def _token_map(checkpoint: Checkpoint, request: ExportRequest) -> TokenMap | None:
    if not checkpoint.config.has_engram or checkpoint.partial_layers is not None or request.layers is not None:
        return None
    return TokenMap.for_model(Tokenizer.open(checkpoint.tokenizer_path, checkpoint.config), checkpoint.config)


def copy_files(checkpoint: Checkpoint, work: Path) -> list[FileRecord]:
    """Config and tokenizer, copied."""
    records = []
    for name in COPIED_FILES:
        source = checkpoint.root / name
        if source.is_file():
            copy_durably(source, work / name)
            records.append(FileRecord.of(work, work / name))
    return records
