"""What a manifest says about one file, one stage, one resident tensor; read strictly, because it may be hostile."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.tensors import ITEM_BYTES, StageSpec

DIGEST_HEX = 64
MAX_BYTES = 2**62
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the artefact: path inside its folder, size, SHA-256 (hex).

    Raises:
        ValueError: on construction, for what cannot be a path, a size or a digest.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path or "\0" in self.path or len(self.path) > 4096:
            raise ValueError(f"the path {str(self.path)[:80]!r}")
        require_size(self.num_bytes)
        require_digest(self.sha256)

    @classmethod
    def of(cls, root: Path, file: Path, sha256: str | None = None) -> FileRecord:
        """Measure a file; its digest is computed, unless whoever wrote it knows it."""
        path = file.relative_to(root).as_posix()
        return cls(path=path, num_bytes=file.stat().st_size, sha256=sha256 or file_digest(file))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FileRecord:
        """The inverse of `to_json`; KeyError, TypeError or ValueError on anything else."""
        return cls(path=document["path"], num_bytes=document["bytes"], sha256=document["sha256"])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a manifest."""
        return {"path": self.path, "bytes": self.num_bytes, "sha256": self.sha256}

    def locate(self, root: Path) -> Path:
        """The file, which must lie inside `root` and have the recorded size.

        Raises:
            ArtifactError: no such file; a path or link that leads outside; a pipe or device; a file that has
                another name too, through which it could be changed; another size.
        """
        relative = PurePosixPath(self.path)
        file = root / relative
        if relative.is_absolute() or ".." in relative.parts:
            raise _damaged(root, f"the path {self.path!r} in a manifest", "a path inside the artefact")
        try:
            inside = file.resolve(strict=True).is_relative_to(root.resolve())
            found = file.stat()
        except (OSError, RuntimeError):
            raise _damaged(file, "no such file", f"a file of {self.num_bytes:,} bytes") from None
        if not inside:
            raise _damaged(file, "a link out of the artefact", "a file inside it")
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(file, "no regular file", f"a file of {self.num_bytes:,} bytes")
        if found.st_nlink > 1:
            remedy = "Copy the artefact without hard links (`cp -r`), or export the checkpoint again."
            raise _damaged(file, f"{found.st_nlink} hard links to one file", "a file with one name", remedy)
        if found.st_size != self.num_bytes:
            raise _damaged(file, f"{found.st_size:,} bytes", f"{self.num_bytes:,}")
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

    def __post_init__(self) -> None:
        if not isinstance(self.shard, str):
            raise TypeError(f"the shard {str(self.shard)[:80]!r}")
        require_size(self.offset)
        require_size(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRecord:
    """Weights that are bound and not baked: the parts in the checkpoint, in order, are the tensor.

    Attributes:
        key: of the tensor across stages.
        dtype, shape: of the whole.
        parts: where it lies in the checkpoint.
        sha256: over the parts' bytes; None where the export was asked not to read weights.
        source: digest that says in which state the shards were; None likewise.
        copy: the artefact's own copy, one after the other as they are bound; None where there is none.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ResidentPart, ...]
    sha256: str | None
    source: str | None = None
    copy: FileRecord | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or self.dtype not in ITEM_BYTES:
            raise ValueError(f"a resident tensor {str(self.key)[:80]!r} of dtype {str(self.dtype)[:20]!r}")
        num_bytes = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            require_size(extent)
            num_bytes *= extent
        for digest in (self.sha256, self.source):
            if digest is not None:
                require_digest(digest)
        lengths = [sum(part.num_bytes for part in self.parts)]
        lengths += [] if self.copy is None else [self.copy.num_bytes]
        if any(length != num_bytes for length in lengths):
            raise ValueError(f"{self.key}: {lengths} bytes for shape {list(self.shape)}")

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return sum(part.num_bytes for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a manifest."""
        document: dict[str, Any] = {
            "key": self.key,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": self.sha256,
            "parts": [[part.shard, part.offset, part.num_bytes] for part in self.parts],
        }
        if self.source is not None:
            document["source"] = self.source
        if self.copy is not None:
            document["copy"] = self.copy.to_json()
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ResidentRecord:
        """The inverse of `to_json`; KeyError, TypeError or ValueError on anything else."""
        return cls(
            key=document["key"],
            dtype=document["dtype"],
            shape=tuple(document["shape"]),
            sha256=document["sha256"],
            source=document.get("source"),
            copy=FileRecord.from_json(document["copy"]) if "copy" in document else None,
            parts=tuple(
                ResidentPart(shard=shard, offset=offset, num_bytes=num_bytes)
                for shard, offset, num_bytes in document["parts"]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage: its interface, its files, and the digest of everything they were made from."""

    spec: StageSpec
    onnx: FileRecord
    data: FileRecord
    inputs_digest: str

    def __post_init__(self) -> None:
        require_digest(self.inputs_digest)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a manifest."""
        return {
            "spec": self.spec.to_json(),
            "onnx": self.onnx.to_json(),
            "data": self.data.to_json(),
            "inputs_digest": self.inputs_digest,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageRecord:
        """The inverse of `to_json`; KeyError, TypeError or ValueError on anything else."""
        return cls(
            spec=StageSpec.from_json(document["spec"]),
            onnx=FileRecord.from_json(document["onnx"]),
            data=FileRecord.from_json(document["data"]),
            inputs_digest=document["inputs_digest"],
        )


def require_size(value: object) -> None:
    """ValueError unless it is a number of bytes or an extent."""
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise ValueError(f"the size {str(value)[:40]}")


def require_digest(value: object) -> None:
    """ValueError unless it is a SHA-256 in hex."""
    if not isinstance(value, str) or len(value) != DIGEST_HEX or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"the digest {str(value)[:80]!r}")


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


def _damaged(where: Path, found: str, expected: str, remedy: str = "Export the checkpoint again.") -> ArtifactError:
    return ArtifactError(str(where), found=found, expected=expected, remedy=remedy)
