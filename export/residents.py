"""Where the weights that stay in the checkpoint lie: experts and Engram tables, by shard and offset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from engram_trt.configs.artifact import ResidentPart, ResidentRecord
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.modeling.weights import resident_tensor_names

_BLOCK_BYTES = 1 << 24


def resident_records(
    checkpoint: Checkpoint,
    specs: Sequence[StageSpec],
    progress: Callable[[int], None],
    *,
    digests: bool,
    known: Mapping[str, ResidentRecord],
) -> tuple[ResidentRecord, ...]:
    """Records of every resident input of some stages.

    Args:
        checkpoint: holds the weights.
        specs: stages.
        progress: called with the number of bytes just digested.
        digests: read and digest the weights, and refuse scales that are NaN.
        known: records of an older artefact; a digest is taken over if the parts are the same.

    Raises:
        CheckpointError: a scale is NaN, or a shard changed or cannot be read.
    """
    records: dict[str, ResidentRecord] = {}
    for spec in specs:
        for tensor in spec.inputs:
            if tensor.role == "resident" and tensor.key not in records:
                records[tensor.key] = _record(checkpoint, tensor, progress, digests, known.get(tensor.key))
    return tuple(records.values())


def _record(
    checkpoint: Checkpoint,
    tensor: TensorSpec,
    progress: Callable[[int], None],
    digests: bool,
    old: ResidentRecord | None,
) -> ResidentRecord:
    names = resident_tensor_names(checkpoint.config, tensor)
    entries = [checkpoint.entry(name) for name in names]
    parts = tuple(
        ResidentPart(shard=entry.shard.name, offset=entry.offset, num_bytes=entry.nbytes) for entry in entries
    )
    stacked = (len(entries),) if len(tensor.shape) == len(entries[0].shape) + 1 else ()
    sha256 = None
    if digests and old is not None and old.parts == parts and old.sha256 is not None:
        sha256 = old.sha256
    elif digests:
        digest = hashlib.sha256()
        for name, entry in zip(names, entries, strict=True):
            checkpoint.check_scales(entry)
            values = checkpoint.bytes(name)
            for start in range(0, entry.nbytes, _BLOCK_BYTES):
                block = values[start : start + _BLOCK_BYTES]
                digest.update(block.data)
                progress(block.nbytes)
        sha256 = digest.hexdigest()
    return ResidentRecord(
        key=tensor.key, dtype=tensor.dtype, shape=(*stacked, *entries[0].shape), parts=parts, sha256=sha256
    )
