"""The manifest of an exported artefact: what is in it, where it came from, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, UserError
from engram_trt.configs.json_file import read_json_object
from engram_trt.configs.tensors import StageSpec

MANIFEST_NAME = "manifest.json"
FORMAT = "engram-trt artefact"
VERSION = 1
"""Raised when an older runtime could not read what is written now."""

WEIGHT_MARK = "engram_trt.weight"
"""ONNX metadata key of an initializer that is a weight: constants of a graph are the same in every layer of a kind,
weights are not."""

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the artefact: path inside its folder, size, SHA-256 (hex)."""

    path: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, root: Path, file: Path) -> FileRecord:
        """Measure a file."""
        return cls(path=file.relative_to(root).as_posix(), num_bytes=file.stat().st_size, sha256=file_digest(file))

    def locate(self, root: Path) -> Path:
        """The file, which must lie inside `root` and have the recorded size; ArtifactError otherwise."""
        relative = PurePosixPath(self.path)
        if relative.is_absolute() or ".." in relative.parts:
            raise _damaged(root / MANIFEST_NAME, f"the path {self.path!r}", "a path inside the artefact")
        file = root / relative
        if not file.is_file() or not file.resolve().is_relative_to(root.resolve()):
            raise _damaged(file, "no such file inside the artefact", f"a file of {self.num_bytes:,} bytes")
        if file.stat().st_size != self.num_bytes:
            raise _damaged(file, f"{file.stat().st_size:,} bytes", f"{self.num_bytes:,}")
        return file

    def verify(self, root: Path) -> Path:
        """`locate`, and compare the digest."""
        file = self.locate(root)
        found = file_digest(file)
        if found != self.sha256:
            raise _damaged(file, f"SHA-256 {found[:12]}...", f"{self.sha256[:12]}...")
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPart:
    """A piece of a resident tensor in the checkpoint: shard file name, absolute offset and length in bytes."""

    shard: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRecord:
    """Weights that stay in the checkpoint: the parts, in order, are the tensor.

    `sha256` is over the parts' bytes, or None where the export was asked not to read weights.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ResidentPart, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage: its interface, its files, and the digest of everything they were made from."""

    spec: StageSpec
    onnx: FileRecord
    data: FileRecord
    inputs_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a runtime needs to know about an artefact.

    Args:
        model_digest: of `config.json`'s identity (see `ModelConfig.digest`).
        deployment: limits and numerics it was exported for.
        has_weights: False for data files of zeros.
        checkpoint_path: where the checkpoint was.
        checkpoint_digest: of its config, index and shard headers.
        token_map_sha256: of the whole compressed token map; None for a model without Engram.
        tools: name -> version of what decided the graphs.
        stages: in the order they run.
        residents: weights to bind from the checkpoint.
        files: config and tokenizer.
    """

    model_digest: str
    deployment: DeploymentConfig
    has_weights: bool
    checkpoint_path: str
    checkpoint_digest: str
    token_map_sha256: str | None
    tools: Mapping[str, str]
    stages: tuple[StageRecord, ...]
    residents: tuple[ResidentRecord, ...]
    files: tuple[FileRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with a digest over the rest, so that an edit by hand is noticed."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model_digest": self.model_digest,
            "deployment": self.deployment.to_dict(),
            "has_weights": self.has_weights,
            "checkpoint_path": self.checkpoint_path,
            "checkpoint_digest": self.checkpoint_digest,
            "token_map_sha256": self.token_map_sha256,
            "tools": dict(self.tools),
            "files": [_plain(record) for record in self.files],
            "stages": [
                {
                    "spec": record.spec.to_json(),
                    "onnx": _plain(record.onnx),
                    "data": _plain(record.data),
                    "inputs_digest": record.inputs_digest,
                }
                for record in self.stages
            ],
            "residents": [
                {
                    "key": record.key,
                    "dtype": record.dtype,
                    "shape": list(record.shape),
                    "sha256": record.sha256,
                    "parts": [[part.shard, part.offset, part.num_bytes] for part in record.parts],
                }
                for record in self.residents
            ],
        }
        return {**document, "digest": document_digest(document)}

    @property
    def digest(self) -> str:
        """Identity of the artefact, for whatever is derived from it."""
        return str(self.to_json()["digest"])

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """Read `manifest.json` of an artefact.

        Raises:
            ArtifactError: no artefact, another version, or a file that was changed by hand.
        """
        path = root / MANIFEST_NAME
        if not path.is_file():
            raise ArtifactError(
                str(root),
                found="a folder without manifest.json" if root.is_dir() else "no such folder",
                expected="an artefact",
                remedy="Write one with `engram-trt export CHECKPOINT --out DIR`.",
            )
        document = read_json_object(path, ArtifactError)
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ArtifactError(
                str(path),
                found=f"format {document.get('format')!r}, version {document.get('version')!r}",
                expected=f"{FORMAT!r}, version {VERSION}",
                remedy="Export the checkpoint again with this version of engram-trt.",
            )
        stated = document.pop("digest", None)
        if stated != document_digest(document):
            raise _damaged(path, "a manifest that was changed after it was written", "its own digest")
        try:
            return cls._from_json(document)
        except (KeyError, TypeError, ValueError, UserError) as error:
            raise _damaged(path, f"an entry that cannot be read ({error})", "what export writes") from None

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> Manifest:
        return cls(
            model_digest=document["model_digest"],
            deployment=DeploymentConfig.from_dict(document["deployment"]),
            has_weights=document["has_weights"],
            checkpoint_path=document["checkpoint_path"],
            checkpoint_digest=document["checkpoint_digest"],
            token_map_sha256=document["token_map_sha256"],
            tools=document["tools"],
            files=tuple(_file(item) for item in document["files"]),
            stages=tuple(
                StageRecord(
                    spec=StageSpec.from_json(item["spec"]),
                    onnx=_file(item["onnx"]),
                    data=_file(item["data"]),
                    inputs_digest=item["inputs_digest"],
                )
                for item in document["stages"]
            ),
            residents=tuple(
                ResidentRecord(
                    key=item["key"],
                    dtype=item["dtype"],
                    shape=tuple(item["shape"]),
                    sha256=item["sha256"],
                    parts=tuple(
                        ResidentPart(shard=shard, offset=offset, num_bytes=num_bytes)
                        for shard, offset, num_bytes in item["parts"]
                    ),
                )
                for item in document["residents"]
            ),
        )


def document_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of canonical JSON."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _plain(record: FileRecord) -> dict[str, Any]:
    return {"path": record.path, "bytes": record.num_bytes, "sha256": record.sha256}


def _file(document: Mapping[str, Any]) -> FileRecord:
    return FileRecord(path=document["path"], num_bytes=document["bytes"], sha256=document["sha256"])


def _damaged(where: Path, found: str, expected: str) -> ArtifactError:
    return ArtifactError(str(where), found=found, expected=expected, remedy="Export the checkpoint again.")
