"""Finished stages of an export under way, those of the artefact it replaces, and the switch between the two."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from engram_trt.configs.artifact import MANIFEST_NAME, FileRecord, Manifest, ResidentRecord, StageRecord
from engram_trt.configs.errors import ArtifactError, UserError
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.atomic_folder import sync_folder
from engram_trt.export.onnx_export import write_atomically
from engram_trt.runtime.stage_runners.tensorrt_manifest import ENGINES_FOLDER


class StageStore:
    """Knows which stages are done.

    A stage counts as done once its record is written, which happens after its files are on the disk. A record
    names the digest of what the stage was made from; another digest means: make it again.

    Args:
        folder: of the stage files, inside `work`.
        work: folder that will become the artefact.
        out: where the artefact will be; may hold an older one.
    """

    def __init__(self, folder: Path, work: Path, out: Path) -> None:
        self.folder, self.work, self.out = folder, work, out
        self._old = self._read_old()

    @property
    def known_residents(self) -> dict[str, ResidentRecord]:
        """Resident weights whose digest an older artefact of the same checkpoint knows, by key."""
        return {} if self._old is None else {record.key: record for record in self._old.residents}

    def find(self, name: str, inputs_digest: str) -> StageRecord | None:
        """The stage, if it is done: in the work folder, or in the older artefact, from where it is taken over."""
        path = self._record_path(name)
        if path.is_file():
            record = self._read_record(path)
            if record is not None and record.inputs_digest == inputs_digest:
                return record
        return self._take_over(name, inputs_digest)

    def add(self, spec: StageSpec, inputs_digest: str, onnx_path: Path, data_path: Path) -> StageRecord:
        """Record a stage whose files are written and synced."""
        record = StageRecord(
            spec=spec,
            onnx=FileRecord.of(self.work, onnx_path),
            data=FileRecord.of(self.work, data_path),
            inputs_digest=inputs_digest,
        )
        self._write_record(record)
        return record

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, last of all files, and put the folder in the place of an older one."""
        wanted = {Path(record.onnx.path).name for record in manifest.stages}
        wanted |= {Path(record.data.path).name for record in manifest.stages}
        for path in self.folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        text = json.dumps(manifest.to_json(), indent=1)
        write_atomically(self.work / MANIFEST_NAME, text.encode())
        sync_folder(self.folder)
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

    def _record_path(self, name: str) -> Path:
        return self.folder / f"{name}.record.json"

    def _write_record(self, record: StageRecord) -> None:
        document = {
            "spec": record.spec.to_json(),
            "inputs_digest": record.inputs_digest,
            "files": [[item.path, item.num_bytes, item.sha256] for item in (record.onnx, record.data)],
        }
        sync_folder(self.folder)
        write_atomically(self._record_path(record.spec.name), json.dumps(document).encode())

    def _read_record(self, path: Path) -> StageRecord | None:
        """A record whose files are there; None for anything else, which is then made again."""
        try:
            document = json.loads(path.read_bytes())
            files = [FileRecord(path=item[0], num_bytes=item[1], sha256=item[2]) for item in document["files"]]
            for item in files:
                item.locate(self.work)
            return StageRecord(
                spec=StageSpec.from_json(document["spec"]),
                onnx=files[0],
                data=files[1],
                inputs_digest=document["inputs_digest"],
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError, ArtifactError):
            return None

    def _read_old(self) -> Manifest | None:
        try:
            return Manifest.read(self.out)
        except UserError:
            return None

    def _take_over(self, name: str, inputs_digest: str) -> StageRecord | None:
        records = () if self._old is None else self._old.stages
        for record in records:
            if record.spec.name != name or record.inputs_digest != inputs_digest:
                continue
            try:
                for item in (record.onnx, record.data):
                    shutil.copyfile(item.locate(self.out), self.work / item.path)
            except ArtifactError:
                return None
            self._write_record(record)
            return record
        return None
