"""The manifest of an exported artefact: what is in it, where it came from, and how to tell that it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.artifact_records import (
    FileRecord,
    ResidentPart,
    ResidentRecord,
    StageRecord,
    document_digest,
    file_digest,
    require_digest,
)
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, UserError
from engram_trt.configs.json_file import read_json_object

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "VERSION",
    "WEIGHT_MARK",
    "FileRecord",
    "Manifest",
    "ResidentPart",
    "ResidentRecord",
    "StageRecord",
    "document_digest",
    "file_digest",
]

MANIFEST_NAME = "manifest.json"
FORMAT = "engram-trt artefact"
VERSION = 1
"""Raised when an older runtime could not read what is written now."""

WEIGHT_MARK = "engram_trt.weight"
"""ONNX metadata key of an initializer that is a weight: constants of a graph are the same in every layer of a kind,
weights are not."""

_MAX_MANIFEST_BYTES = 64 << 20


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
        residents: weights to bind, from the checkpoint or from copies.
        files: config and tokenizer.
        layers: the checkpoint was opened for the blocks of these layers only; None for all it has.
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
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for digest in (self.model_digest, self.checkpoint_digest, self.token_map_sha256):
            if digest is not None:
                require_digest(digest)
        if not isinstance(self.has_weights, bool) or not isinstance(self.checkpoint_path, str):
            raise ValueError("has_weights or checkpoint_path of another type")
        if self.layers is not None and not all(type(layer_id) is int for layer_id in self.layers):
            raise ValueError("layers that are no layer ids")
        if not all(isinstance(text, str) for pair in self.tools.items() for text in pair):
            raise ValueError("tools that are no versions")
        paths = [record.path for record in self.all_files()]
        names = [record.spec.name for record in self.stages]
        keys = [record.key for record in self.residents]
        for what, entries in (("file", paths), ("stage", names), ("resident tensor", keys)):
            if len(set(entries)) != len(entries):
                raise ValueError(f"a {what} listed twice")

    def all_files(self) -> Iterator[FileRecord]:
        """Every file of the artefact but the manifest, the small ones first."""
        yield from self.files
        for stage in self.stages:
            yield from (stage.onnx, stage.data)
        yield from (record.copy for record in self.residents if record.copy is not None)

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
            "files": [record.to_json() for record in self.files],
            "stages": [record.to_json() for record in self.stages],
            "residents": [record.to_json() for record in self.residents],
        }
        if self.layers is not None:
            document["layers"] = list(self.layers)
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
        return cls.parse(read_json_object(path, ArtifactError, max_bytes=_MAX_MANIFEST_BYTES), path)

    @classmethod
    def parse(cls, document: dict[str, Any], path: Path) -> Manifest:
        """Check a parsed `manifest.json`; see `read`. Whatever it holds, the answer is one or an ArtifactError."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ArtifactError(
                str(path),
                found=f"format {document.get('format')!r:.80}, version {document.get('version')!r:.80}",
                expected=f"{FORMAT!r}, version {VERSION}",
                remedy="Export the checkpoint again with this version of engram-trt.",
            )
        try:
            rest = {key: value for key, value in document.items() if key != "digest"}
            if document.get("digest") != document_digest(rest):
                raise _damaged(path, "a manifest that was changed after it was written", "its own digest")
            return cls._from_json(document)
        except ArtifactError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
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
            tools=dict(document["tools"]),
            files=tuple(FileRecord.from_json(item) for item in document["files"]),
            stages=tuple(StageRecord.from_json(item) for item in document["stages"]),
            residents=tuple(ResidentRecord.from_json(item) for item in document["residents"]),
            layers=tuple(document["layers"]) if "layers" in document else None,
        )


def _damaged(where: Path, found: str, expected: str) -> ArtifactError:
    return ArtifactError(str(where), found=found, expected=expected, remedy="Export the checkpoint again.")
