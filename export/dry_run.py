"""Every file an export would write, with its exact size; graphs are traced, no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engram_trt.configs.artifact import MANIFEST_NAME, FileRecord, ResidentRecord, StageRecord
from engram_trt.configs.artifact_records import DIGEST_HEX
from engram_trt.export.graph_pool import trace_kinds
from engram_trt.export.graph_store import GraphStore
from engram_trt.export.pipeline import COPIED_FILES, ExportRequest, OpenExport
from engram_trt.export.residents import RESIDENTS_FOLDER, Resident
from engram_trt.export.stage_records import STAGES_FOLDER, manifest_text, record_name, record_text
from engram_trt.export.work_folder import require_artifact_or_nothing

_DIGEST = "0" * DIGEST_HEX
"""Stands for a digest, all of which have one length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file of the artefact: its path there and its size."""

    path: str
    num_bytes: int


def planned_files(
    request: ExportRequest, graphs: GraphStore | None = None, traced: Callable[[str], None] = lambda kind: None
) -> list[PlannedFile]:
    """The files of `export_checkpoint` for the same request, the manifest last.

    Args:
        request: what would be exported.
        graphs: where traced graphs are kept; the user's cache folder by default.
        traced: called with a kind of stage when its graph is there.

    Raises:
        UserError: what would keep the export from starting, except a full disk.
    """
    require_artifact_or_nothing(request.out)
    export = OpenExport.open(request, graphs)
    trace_kinds(export.exporter, export.specs, traced)
    stages = list(_stages(export))
    residents = [_resident(export, resident) for resident in export.residents]
    copied = [
        FileRecord(path=name, num_bytes=(export.checkpoint.root / name).stat().st_size, sha256=_DIGEST)
        for name in COPIED_FILES
        if (export.checkpoint.root / name).is_file()
    ]
    files = [PlannedFile(path=item.path, num_bytes=item.num_bytes) for item in copied]
    for stage in stages:
        files += [PlannedFile(path=item.path, num_bytes=item.num_bytes) for item in (stage.onnx, stage.data)]
        name = f"{STAGES_FOLDER}/{record_name(stage.spec.name)}"
        files.append(PlannedFile(path=name, num_bytes=len(record_text(stage.to_json()))))
    for resident, record in zip(export.residents, residents, strict=True):
        if record.copy is not None:
            files.append(PlannedFile(path=record.copy.path, num_bytes=record.copy.num_bytes))
        if request.weights or resident.copied:
            name = f"{RESIDENTS_FOLDER}/{record_name(record.key)}"
            files.append(PlannedFile(path=name, num_bytes=len(record_text(record.to_json()))))
    manifest = export.manifest(stages, residents, copied)
    return [*files, PlannedFile(path=MANIFEST_NAME, num_bytes=len(manifest_text(manifest)))]


def _stages(export: OpenExport) -> Iterator[StageRecord]:
    for spec in export.specs:
        onnx_bytes, data_bytes = export.exporter.file_bytes(spec)
        yield StageRecord(
            spec=spec,
            onnx=FileRecord(path=f"{STAGES_FOLDER}/{spec.name}.onnx", num_bytes=onnx_bytes, sha256=_DIGEST),
            data=FileRecord(path=f"{STAGES_FOLDER}/{spec.name}.data", num_bytes=data_bytes, sha256=_DIGEST),
            inputs_digest=_DIGEST,
        )


def _resident(export: OpenExport, resident: Resident) -> ResidentRecord:
    digest = _DIGEST if export.request.weights else None
    copy = None
    if resident.copied:
        path = f"{RESIDENTS_FOLDER}/{resident.file_name}"
        copy = FileRecord(path=path, num_bytes=resident.num_bytes, sha256=_DIGEST)
    return resident.record(digest, digest, copy)
