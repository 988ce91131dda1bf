"""Weights that are bound and not baked, experts and Engram tables: where they lie, their digests, their copies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram_trt.configs.artifact import FileRecord, ResidentPart, ResidentRecord
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.configs.shard_reading import BLOCK_BYTES, check_scale_block
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.digested_writer import DigestedWriter
from engram_trt.export.modeling.weights import resident_tensor_names
from engram_trt.export.provenance import shards_digest

RESIDENTS_FOLDER = "residents"
EXPERTS = "experts_"
READ_AHEAD = 4
"""Parts the disk is told of in advance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One resident tensor of a model, about to be recorded.

    Attributes:
        tensor: the input of a stage that it is bound to.
        entries: its parts in the checkpoint, in order.
        copied: whether the artefact gets its own copy.
    """

    tensor: TensorSpec
    entries: tuple[TensorEntry, ...]
    copied: bool

    @property
    def key(self) -> str:
        return self.tensor.key

    @property
    def num_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def file_name(self) -> str:
        """Of the copy."""
        return f"{self.key}.bin"

    def record(self, sha256: str | None, source: str | None, copy: FileRecord | None) -> ResidentRecord:
        """What the manifest says about it."""
        parts = tuple(ResidentPart(shard=e.shard.name, offset=e.offset, num_bytes=e.nbytes) for e in self.entries)
        stacked = (len(parts),) if len(self.tensor.shape) == len(self.entries[0].shape) + 1 else ()
        return ResidentRecord(
            key=self.key,
            dtype=self.tensor.dtype,
            shape=(*stacked, *self.entries[0].shape),
            parts=parts,
            sha256=sha256,
            source=source,
            copy=copy,
        )


def residents_of(checkpoint: Checkpoint, specs: Sequence[StageSpec], *, copy_experts: bool) -> tuple[Resident, ...]:
    """Every resident input of some stages, once; of these, experts are copied if asked for, tables never."""
    found: dict[str, Resident] = {}
    for spec in specs:
        for tensor in spec.inputs:
            if tensor.role == "resident" and tensor.key not in found:
                names = resident_tensor_names(checkpoint.config, tensor)
                found[tensor.key] = Resident(
                    tensor=tensor,
                    entries=tuple(map(checkpoint.entry, names)),
                    copied=copy_experts and tensor.tensor.startswith(EXPERTS),
                )
    return tuple(found.values())


def source_digest(checkpoint: Checkpoint, resident: Resident) -> str:
    """Says which shards, in which state, a resident tensor was read from."""
    return shards_digest(checkpoint, [entry.name for entry in resident.entries])


def read_resident(checkpoint: Checkpoint, resident: Resident, progress: Callable[[int], None]) -> str:
    """Read and digest a resident tensor.

    Args:
        checkpoint: holds it.
        resident: which.
        progress: called with the number of bytes just read.

    Returns:
        SHA-256 (hex).

    Raises:
        CheckpointError: a scale is NaN, or a shard changed or cannot be read.
    """
    digest = hashlib.sha256()
    for block in _blocks(checkpoint, resident):
        digest.update(block)
        progress(len(block))
    return digest.hexdigest()


def copy_resident(
    checkpoint: Checkpoint, resident: Resident, path: Path, progress: Callable[[int], None], *, zeros: bool = False
) -> str:
    """Write a resident tensor's parts one after the other, so that the whole can be mapped as it is bound.

    Args:
        checkpoint, resident, progress: as in `read_resident`.
        path: of the copy.
        zeros: write a hole of the right size and read nothing.

    Raises:
        CheckpointError: as `read_resident`.
        OSError: the disk is full or not writable.
    """
    with DigestedWriter(path) as file:
        if zeros:
            file.skip(resident.num_bytes)
            progress(resident.num_bytes)
            return file.finish()
        for block in _blocks(checkpoint, resident):
            file.write(block)
            progress(len(block))
        return file.finish()


def _blocks(checkpoint: Checkpoint, resident: Resident) -> Iterator[memoryview]:
    """The bytes of all parts in order, scales checked; the disk is told of the next parts while one is read."""
    for number, entry in enumerate(resident.entries):
        for following in resident.entries[number + 1 : number + 1 + READ_AHEAD]:
            checkpoint.expect(following.name)
        start = 0
        for block in checkpoint.blocks(entry.name, BLOCK_BYTES):
            if entry.dtype == "F8_E8M0":
                check_scale_block(entry, start, block)
            yield block
            start += len(block)
