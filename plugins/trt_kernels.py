"""Compiled kernels on the disk: machine code, and what a launch of it needs. Read without Triton."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import ArtifactError, KernelError
from engram_trt.plugins.kernels.plan import TRAILING_POINTERS, Variant

_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_SIGNATURE_BYTES = {"i32": 4, "i64": 8, "fp32": 4}
POINTER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """One compiled variant.

    Args:
        op: op type.
        label: of the variant, unique among the op's.
        sm: compute capability.
        entry: function in the image.
        sha256: of the image, which is also its file name.
        num_bytes: of the image.
        num_threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        parameters: PTX types of the entry's parameters.
    """

    op: str
    label: str
    sm: int
    entry: str
    sha256: str
    num_bytes: int
    num_threads: int
    shared_bytes: int
    parameters: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """Name of the image's file."""
        return f"{self.sha256}.cubin"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "parameters": list(self.parameters)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> KernelRecord:
        """The inverse of `to_json`; TypeError or KeyError on anything else."""
        return cls(**{**document, "parameters": tuple(document["parameters"])})


class KernelLibrary:
    """Kernels of one or more GPUs.

    Args:
        folder: of the images.
        records: what is there.
    """

    def __init__(self, folder: Path, records: Iterable[KernelRecord]) -> None:
        self.folder = folder
        self._records = {(record.sm, record.op, record.label): record for record in records}

    def __iter__(self) -> Iterator[KernelRecord]:
        return iter(self._records.values())

    def has(self, variant: Variant, sm: int) -> bool:
        """Whether the variant was compiled for a GPU."""
        return (sm, variant.op, variant.label) in self._records

    def find(self, variant: Variant, sm: int) -> KernelRecord:
        """The kernel of a variant.

        Raises:
            KernelError: it was not compiled for this GPU, or takes other arguments than this code would pass.
        """
        record = self._records.get((sm, variant.op, variant.label))
        if record is None:
            known = sorted({key[0] for key in self._records})
            raise KernelError(
                f"{variant.op}: kernel {variant.label}",
                found=f"none compiled for sm_{sm} (kernels are there for {known})",
                expected="one among the engines' kernels",
                remedy=f"Build with --target sm_{sm}.",
            )
        _check_parameters(record, variant)
        return record

    def image(self, record: KernelRecord) -> bytes:
        """Machine code of a kernel; ArtifactError if it is missing or was changed."""
        path = self.folder / record.file_name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _damaged(path, str(error.strerror)) from None
        if hashlib.sha256(content).hexdigest() != record.sha256:
            raise _damaged(path, f"{len(content):,} bytes with another digest")
        return content


def _damaged(path: Path, found: str) -> ArtifactError:
    return ArtifactError(str(path), found=found, expected="a compiled kernel", remedy="Run `engram-trt build` again.")


def _check_parameters(record: KernelRecord, variant: Variant) -> None:
    expected = [_SIGNATURE_BYTES.get(kind, POINTER_BYTES) for _, kind in variant.signature]
    expected += [POINTER_BYTES] * TRAILING_POINTERS
    found = [_PTX_BYTES.get(kind.lstrip("abcdefghijklmnopqrstuvwxyz"), 0) for kind in record.parameters]
    if found != expected:
        raise KernelError(
            f"{record.op}: kernel {record.label}",
            found=f"parameters of {found} bytes",
            expected=f"{expected}",
            remedy="Kernels and code are of different versions: run `engram-trt build` again.",
        )
