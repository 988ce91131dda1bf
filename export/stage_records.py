"""What is finished of an export under way, what the artefact it replaces has, and the switch between the two."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from engram_trt.configs.artifact import MANIFEST_NAME, FileRecord, Manifest, ResidentRecord, StageRecord
from engram_trt.configs.errors import ArtifactError, UserError
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.atomic_folder import sync_folder, write_atomically
from engram_trt.export.digested_writer import copy_digested
from engram_trt.export.onnx_export import StageFiles
from engram_trt.export.residents import RESIDENTS_FOLDER
from engram_trt.runtime.stage_runners.tensorrt_manifest import ENGINES_FOLDER

STAGES_FOLDER = "stages"

Record = TypeVar("Record", StageRecord, ResidentRecord)


class StageStore:
    """Knows which stages and which resident tensors are done.

    A thing counts as done once its record is written, which happens after its files are on the disk. A record
    names the digest of what the thing was made from; another digest means: make it again.

    Args:
        work: folder that will become the artefact.
        out: where the artefact will be; may hold an older one.
    """

    def __init__(self, work: Path, out: Path) -> None:
        self.work, self.out = work, out
        self.stages, self.residents = work / STAGES_FOLDER, work / RESIDENTS_FOLDER
        self.old = _read_old(out)

    def find(self, name: str, inputs_digest: str) -> StageRecord | None:
        """The stage, if it is done: in the work folder, or in the older artefact, from where it is taken over."""
        path = self.stages / record_name(name)
        record = _read_record(path, StageRecord)
        if record is not None and record.inputs_digest == inputs_digest and self._has(record.onnx, record.data):
            return record
        for record in () if self.old is None else self.old.stages:
            if record.spec.name == name and record.inputs_digest == inputs_digest:
                return self._take_over(record, path, record.onnx, record.data)
        return None

    def add(self, spec: StageSpec, inputs_digest: str, files: StageFiles) -> StageRecord:
        """Record a stage whose files are written and synced."""
        record = StageRecord(
            spec=spec,
            onnx=FileRecord.of(self.work, files.onnx, files.onnx_sha256),
            data=FileRecord.of(self.work, files.data, files.data_sha256),
            inputs_digest=inputs_digest,
        )
        self._write(self.stages / record_name(spec.name), record.to_json())
        return record

    def find_resident(self, key: str, source: str | None, *, copied: bool) -> ResidentRecord | None:
        """The record of a resident tensor read from shards in this state; with its copy, if there is to be one."""
        if source is None:
            return None
        path = self.residents / record_name(key)

        def fits(record: ResidentRecord) -> bool:
            return record.key == key and record.source == source and (record.copy is not None or not copied)

        mine = _read_record(path, ResidentRecord)
        if mine is not None and fits(mine):
            if not copied or mine.copy is None:
                return replace(mine, copy=None)
            if self._has(mine.copy):
                return mine
        for record in filter(fits, () if self.old is None else self.old.residents):
            if not copied or record.copy is None:
                return replace(record, copy=None)
            return self._take_over(record, path, record.copy)
        return None

    def add_resident(self, record: ResidentRecord) -> None:
        """Record a resident tensor that was read, and whose copy, if any, is written and synced."""
        self._write(self.residents / record_name(record.key), record.to_json())

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, last of all files, and put the folder in the place of an older one."""
        wanted = {record.path for record in manifest.all_files()}
        records = {record_name(record.spec.name) for record in manifest.stages}
        records |= {record_name(record.key) for record in manifest.residents}
        for folder in (self.stages, self.residents):
            for path in folder.iterdir():
                if path.relative_to(self.work).as_posix() not in wanted and path.name not in records:
                    path.unlink()
            sync_folder(folder)
        write_atomically(self.work / MANIFEST_NAME, manifest_text(manifest))
        sync_folder(self.work)
        out = Path(os.path.abspath(self.out))
        aside = self.work.with_name(f".{out.name}.replaced")
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            out.rename(aside)
        self.work.rename(out)
        # TensorRT builds stay: plans of stages that did not change are taken over by the next build.
        engines = aside / ENGINES_FOLDER
        if engines.is_dir() and not (out / ENGINES_FOLDER).exists():
            engines.rename(out / ENGINES_FOLDER)
        sync_folder(out.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _has(self, *files: FileRecord) -> bool:
        try:
            for item in files:
                item.locate(self.work)
        except ArtifactError:
            return False
        return True

    def _take_over(self, record: Record, record_path: Path, *files: FileRecord) -> Record | None:
        """Copy files of the older artefact; None if they are not what it says they are, so that they are made again."""
        try:
            for item in files:
                if copy_digested(item.locate(self.out), self.work / item.path) != item.sha256:
                    return None
        except ArtifactError:
            return None
        self._write(record_path, record.to_json())
        return record

    def _write(self, path: Path, document: Mapping[str, Any]) -> None:
        sync_folder(path.parent)
        write_atomically(path, record_text(document))


def record_name(name: str) -> str:
    """File name of the record of a stage or a resident tensor."""
    return f"{name}.record.json"


def record_text(document: Mapping[str, Any]) -> bytes:
    """Content of a record."""
    return json.dumps(document).encode()


def manifest_text(manifest: Manifest) -> bytes:
    """Content of `manifest.json`."""
    return json.dumps(manifest.to_json(), indent=1).encode()


def _read_record(path: Path, kind: type[Record]) -> Record | None:
    """A record; None for what is absent or no record, which is then made again."""
    try:
        return kind.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_old(out: Path) -> Manifest | None:
    try:
        return Manifest.read(out)
    except UserError:
        return None
