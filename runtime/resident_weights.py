"""Weights that a back end binds: mapped from the artefact's own copy, or read out of the checkpoint's shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from engram_trt.configs.artifact import Manifest, ResidentPart, ResidentRecord
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import ArtifactError, CheckpointError
from engram_trt.configs.safetensors_header import ShardHeader, TensorEntry
from engram_trt.configs.shard_reading import opened_shard, read_blocks
from engram_trt.runtime.stage_runners.contract import Array

READERS = 4
"""Parts read at a time: a disk with a queue, or a page cache, gives more to several."""


class ResidentWeights:
    """The resident tensors of one artefact.

    A tensor with a copy in the artefact is mapped, and so is one that lies in one piece in a shard. Any other is
    stacked: its parts are read straight into their places, several at a time, while the tensor that a stage takes
    next is read behind it. None is kept here: a back end asks once.

    Args:
        root: folder of the artefact.
        manifest: its manifest.
        checkpoint: has what is not copied; None where everything is.
    """

    def __init__(self, root: Path, manifest: Manifest, checkpoint: Checkpoint | None) -> None:
        self.root, self._checkpoint = root, checkpoint
        self._records = {record.key: record for record in manifest.residents}
        self._next = _followers(manifest.residents)
        self._ahead: dict[tuple[str, range | None], Future[Array]] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="residents")
        self._parts = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="resident-parts")

    def record(self, key: str) -> ResidentRecord:
        """What the manifest says of a tensor; ArtifactError if it has none of that name."""
        try:
            return self._records[key]
        except KeyError:
            raise ArtifactError(
                str(self.root),
                found=f"no resident tensor {key}",
                expected="one for every stage that takes it",
                remedy="Export the checkpoint again.",
            ) from None

    def array(self, key: str, rows: range | None = None) -> Array:
        """The values, int8 [shape of the record].

        Args:
            key: of the tensor.
            rows: consecutive ones of the first axis, such as some of the experts; all if None.

        Raises:
            ArtifactError: no such tensor, or a damaged copy.
            CheckpointError: a shard that is absent, changed or too short.
        """
        record = self.record(key)
        if record.copy is not None:
            return _some(np.memmap(record.copy.locate(self.root), dtype=np.int8, mode="r", shape=record.shape), rows)
        if len(record.parts) == 1:
            (part,) = record.parts
            with opened_shard(self._header(record, part)) as file:
                mapped = np.memmap(file, dtype=np.int8, mode="r", offset=part.offset, shape=record.shape)
            return _some(mapped, rows)
        pending = self._ahead.pop((key, rows), None) or self._reader.submit(self._stack, record, rows)
        follower = self._next.get(key)
        if follower is not None and (follower, rows) not in self._ahead:
            self._ahead[follower, rows] = self._reader.submit(self._stack, self._records[follower], rows)
        return pending.result()

    def verify(self, key: str) -> None:
        """Digest a tensor where it lies; a copy is a file of the artefact and verified as such.

        Raises:
            CheckpointError: it is not what was exported.
        """
        record = self.record(key)
        if record.copy is not None or record.sha256 is None:
            return
        digest = hashlib.sha256()
        for part in record.parts:
            header = self._header(record, part)
            for block in read_blocks(header, _as_entry(record, part, header)):
                digest.update(block)
        if digest.hexdigest() != record.sha256:
            raise CheckpointError(
                f"{record.parts[0].shard}: {key}",
                found=f"SHA-256 {digest.hexdigest()[:12]}...",
                expected=f"{record.sha256[:12]}..., as it was exported",
                remedy="Fetch the shard again, or export this checkpoint.",
            )

    def _header(self, record: ResidentRecord, part: ResidentPart) -> ShardHeader:
        headers: Mapping[str, ShardHeader] = {} if self._checkpoint is None else self._checkpoint.shards
        header = headers.get(part.shard)
        if header is None or part.offset + part.num_bytes > header.file_bytes:
            raise CheckpointError(
                part.shard,
                found=f"no bytes {part.offset}..{part.offset + part.num_bytes}",
                expected=f"a part of {record.key}",
                remedy="Give the checkpoint this artefact was exported from with --checkpoint.",
            )
        return header

    def _stack(self, record: ResidentRecord, rows: range | None) -> Array:
        chosen = range(len(record.parts)) if rows is None else rows
        stacked = np.empty((len(chosen), *record.shape[1:]), dtype=np.int8)
        flat = memoryview(stacked.reshape(-1))  # type: ignore[arg-type]
        jobs, start = [], 0
        for part in record.parts[chosen.start : chosen.stop]:
            place = flat[start : start + part.num_bytes]
            jobs.append(self._parts.submit(_read_part, self._header(record, part), part, place))
            start += part.num_bytes
        for job in jobs:
            job.result()
        return stacked


def _some(values: Array, rows: range | None) -> Array:
    return values if rows is None else values[rows.start : rows.stop]


def _followers(records: tuple[ResidentRecord, ...]) -> dict[str, str]:
    """Tensor -> the stacked one of the same layer that is taken after it."""
    stacked = [record.key for record in records if record.copy is None and len(record.parts) > 1]
    return {
        first: second for first, second in pairwise(stacked) if first.rpartition(".")[0] == second.rpartition(".")[0]
    }


def _read_part(header: ShardHeader, part: ResidentPart, place: memoryview) -> None:
    with opened_shard(header) as file:
        done = 0
        while done < part.num_bytes:
            count = os.preadv(file.fileno(), [place[done:]], part.offset + done)
            if count == 0:
                raise CheckpointError(
                    str(header.path),
                    found=f"an end after {part.offset + done:,} bytes",
                    expected=f"{header.file_bytes:,}, as when it was opened",
                    remedy="Do not change a checkpoint while it is in use.",
                )
            done += count


def _as_entry(record: ResidentRecord, part: ResidentPart, header: ShardHeader) -> TensorEntry:
    return TensorEntry(
        name=record.key,
        shard=header.path,
        dtype="I8",
        shape=(part.num_bytes,),
        offset=part.offset,
        nbytes=part.num_bytes,
    )
