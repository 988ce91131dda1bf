"""Reading the weights of a checked shard, and refusing one that changes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.file_identity import FileIdentity
from engram_trt.configs.safetensors_header import ShardHeader, TensorEntry

BLOCK_BYTES = 8 << 20
_SCALE_NAN = 255


@contextmanager
def opened_shard(header: ShardHeader) -> Iterator[BinaryIO]:
    """Open a shard as it was when its header was read, unbuffered.

    Raises:
        CheckpointError: it is gone, cannot be read, or is another file by now.
    """
    try:
        file = header.path.open("rb", buffering=0)
    except OSError as cause:
        raise _unreadable(header.path, cause) from None
    with file:
        _require_same(header, file)
        try:
            yield file
        except OSError as cause:
            raise _unreadable(header.path, cause) from None


def read_blocks(header: ShardHeader, entry: TensorEntry, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block, read and not mapped, so that none of it stays in this process.

    Args:
        header: of the tensor's shard.
        entry: the tensor.
        block_bytes: of every block but the last.

    Raises:
        CheckpointError: as `opened_shard`, or when the shard was written to while it was read.
    """
    with opened_shard(header) as file:
        file.seek(entry.offset)
        for start in range(0, entry.nbytes, block_bytes):
            length = min(block_bytes, entry.nbytes - start)
            block = file.read(length)
            if len(block) != length:
                raise _changed(header.path, f"{len(block):,} of {length:,} bytes of {entry.name}")
            yield memoryview(block)
        _require_same(header, file)


def check_scale_block(entry: TensorEntry, start: int, block: memoryview) -> None:
    """Refuse a NaN scale (byte 255) in the bytes of an E8M0 tensor from byte `start` on.

    Raises:
        CheckpointError: naming the tensor, row and block of the first.
    """
    bad = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _SCALE_NAN)
    if bad.size:
        row, column = divmod(start + int(bad[0]), entry.shape[-1] if entry.shape else 1)
        raise CheckpointError(
            f"{entry.shard}: {entry.name}",
            found=f"scale byte 255 (not a number) in row {row}, block {column}",
            expected="a power of two, bytes 0..254",
            remedy="The weights are damaged; fetch the shard again.",
        )


def _require_same(header: ShardHeader, file: BinaryIO) -> None:
    found = FileIdentity.of(os.fstat(file.fileno()))
    if found.num_bytes != header.file_bytes:
        raise _changed(header.path, f"{found.num_bytes:,} bytes", f"{header.file_bytes:,}, as when it was opened")
    if header.identity not in (None, found):
        raise _changed(header.path, "a file that was written to or replaced")


def _changed(shard: Path, found: str, expected: str = "the file as it was opened") -> CheckpointError:
    return CheckpointError(
        str(shard),
        found=found,
        expected=expected,
        remedy="Do not change a checkpoint while it is in use; when it is complete, run the same command again.",
    )


def _unreadable(shard: Path, cause: OSError) -> CheckpointError:
    return CheckpointError(
        str(shard),
        found=f"a shard that cannot be read ({cause.strerror or cause})",
        expected="a readable file",
        remedy="Check that the checkpoint is still there, and the disk.",
    )
