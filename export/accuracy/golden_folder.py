"""A golden folder: its files, their checksums, and which comparison each belongs to."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.json_file import read_json_object
from engram_trt.export.accuracy.golden_results import NotRun, Results, Vectors
from engram_trt.export.accuracy.golden_source import read_tensors
from engram_trt.export.accuracy.golden_tolerance import EXACT, VOID_MARGINS, Distance

SUFFIX = ".safetensors"
CHECKSUMS = "SHA256SUMS"
PARTS = ("hash", "ops", "model")
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFolder:
    """The folder and the tensor files found in it.

    Args:
        path: the folder.
        tensor_files: every `.safetensors` file, as a relative path with forward slashes, in order.
    """

    path: Path
    tensor_files: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> GoldenFolder:
        """List a folder.

        Raises:
            CheckpointError: it is no folder of golden vectors.
        """
        if not path.is_dir() or not any((path / part).is_dir() for part in PARTS):
            raise CheckpointError(
                str(path),
                found="a folder without hash, ops or model" if path.is_dir() else "no such folder",
                expected="a folder of golden vectors: hash/, ops/, model/<name>/",
                remedy="Give the folder that holds its README and SHA256SUMS.",
            )
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob(f"*{SUFFIX}") if file.is_file())
        if not files:
            raise CheckpointError(
                str(path), found="no tensor files", expected="golden vectors", remedy="Copy the folder again."
            )
        return cls(path=path, tensor_files=tuple(files))

    def has(self, file: str) -> bool:
        """Whether the folder has a file, by relative path."""
        return (self.path / file).is_file()

    def tensors(self, file: str) -> dict[str, Tensor]:
        """All tensors of one file; CheckpointError if it cannot be read."""
        return read_tensors(self.path / file)

    def vectors(self, file: str, backend: str, results: Results) -> Vectors:
        """The same, with a record of how they are used."""
        return Vectors(file, self.tensors(file), backend, results)

    def json(self, file: str) -> dict[str, Any]:
        """A JSON object of the folder, empty if there is no such file; CheckpointError if it is damaged."""
        if not self.has(file):
            return {}
        return read_json_object(self.path / file, CheckpointError, max_bytes=_MAX_JSON_BYTES)

    def model_names(self) -> list[str]:
        """Folders under `model/` that hold tensor files, in order."""
        return sorted({file.split("/")[1] for file in self.tensor_files if re.fullmatch(r"model/[^/]+/[^/]+", file)})

    def check_readable(self) -> None:
        """Read every tensor file once; CheckpointError names the first that is damaged."""
        for file in self.tensor_files:
            self.tensors(file)

    def check_sums(self, results: Results) -> None:
        """Hold the files against `SHA256SUMS`, if there is one.

        A file the list names and the folder lacks is noted: parts of a folder may be left out.

        Raises:
            CheckpointError: a line of the list cannot be read.
        """
        if not self.has(CHECKSUMS):
            results.not_run.append(NotRun(file=CHECKSUMS, backend="-", what="", reason="the folder has none"))
            return
        lines = (self.path / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        sums = Vectors(CHECKSUMS, {}, "-", results)
        for number, line in enumerate(lines, 1):
            match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
            if match is None and line.strip():
                raise CheckpointError(
                    f"{self.path / CHECKSUMS}, line {number}",
                    found=repr(line[:80]),
                    expected="a digest and a file name",
                    remedy="Copy the folder again.",
                )
            if match is not None:
                self._check_sum(match[2].removeprefix("./"), match[1].lower(), sums)

    def _check_sum(self, file: str, expected: str, sums: Vectors) -> None:
        path = self.path / file
        if not path.is_file():
            note = NotRun(file=CHECKSUMS, backend="-", what=file, reason="listed there, not in the folder")
            sums.results.not_run.append(note)
            return
        same = hashlib.sha256(path.read_bytes()).hexdigest() == expected
        note_text = "" if same else "another digest than listed: the file is damaged or was changed"
        sums.record(file, Distance(error=float(not same), ok=same, note=note_text), EXACT, "files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A piece of work of its own.

    Args:
        kind: `hash`, `op` or `model`.
        name: of the op or model.
        mode: numeric mode of a model.
        backend: what to compute with.
        cost: a guess at the time, to start long ones first.
    """

    kind: str
    name: str
    mode: str = ""
    backend: str
    cost: float = 0.0

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.name, self.mode, f"({self.backend})") if part)


def model_file(name: str, part: str) -> str:
    """Relative path of a model's tensor file."""
    return f"model/{name}/{part}{SUFFIX}"


def modes_of(folder: GoldenFolder, name: str) -> list[str]:
    """Numeric modes a model has files of, in order."""
    stems = [
        file.removesuffix(SUFFIX).split("/")[2] for file in folder.tensor_files if file.startswith(f"model/{name}/")
    ]
    modes = {stem.split(".")[0] for stem in stems if "." in stem}
    return [mode for mode in VOID_MARGINS if mode in modes]


def require_model(folder: GoldenFolder, name: str) -> None:
    """CheckpointError unless a model's folder has what every comparison needs."""
    for file in (f"model/{name}/config.json", model_file(name, "inputs"), model_file(name, "weights")):
        if not folder.has(file):
            raise CheckpointError(
                str(folder.path / file),
                found="no such file",
                expected="config.json, inputs.safetensors and weights.safetensors beside a model's vectors",
                remedy="Copy the folder again.",
            )


def dump_json(document: dict[str, Any], path: Path) -> None:
    """Write a report; CheckpointError if that is not possible."""
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            str(path), found=str(error), expected="a file that can be written", remedy="Choose another path."
        ) from None
