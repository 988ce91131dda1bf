"""Make a packed Engram table: resumable, published when complete, safe against a second process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import CheckpointError, DeploymentError
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.runtime.engram.files import Bytes, unreadable
from engram_trt.runtime.engram.packed import (
    PAGE,
    PackedHeader,
    PackedTable,
    checksums_digest,
    pack_records,
    packed_path,
    read_header,
    require_same_rows,
    unpack_blocks,
)
from engram_trt.runtime.engram.tables import MappedTable, ShardFiles, Table, table_entries

SYNC_BLOCKS = 64
"""Blocks between two points from which a killed run goes on."""
_SCALE_NAN = 255

Progress = Callable[[int], None]


def pack_table(checkpoint: Checkpoint, layer_id: int, folder: Path, progress: Progress | None = None) -> Path:
    """Write the packed file of one layer, or finish one that was begun, or keep one that is complete.

    The work is done in `<file>.partial`, which a second process waits for. The finished file appears in one
    rename; whatever interrupts the work leaves the old file or none, and the next run goes on.

    Args:
        checkpoint: has the table.
        layer_id: an Engram layer.
        folder: where to put it.
        progress: called with the number of table bytes just done.

    Returns:
        The file.

    Raises:
        CheckpointError: the source cannot be read, or has a scale that is not a number.
        DeploymentError: the folder cannot be written, or has too little room.
    """
    rows, scales, shape = table_entries(checkpoint, layer_id)
    header = PackedHeader(
        layer_id=layer_id,
        num_rows=shape.num_rows,
        row_bytes=shape.row_bytes,
        scale_bytes=shape.scale_bytes,
        source_digest=checkpoint.header_digest,
    )
    target = packed_path(folder, layer_id)
    report = progress or (lambda _: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _work_file(target) as descriptor, closing(ShardFiles(checkpoint.shard_sizes)) as files:
            if is_packed(target, header, MappedTable(shape, rows, scales, files)):
                report(shape.num_bytes)
                _forget(target)
                return target
            _require_room(folder, descriptor, header)
            _Packing(descriptor, header, rows, scales, target, report).run()
    except OSError as cause:
        raise DeploymentError(
            str(target),
            found=f"a file system that refuses ({cause.strerror or cause})",
            expected=f"a writable folder with {header.file_bytes:,} bytes of room",
            remedy="Free some room and run the same command again; it goes on where it stopped.",
        ) from cause
    return target


def is_packed(target: Path, header: PackedHeader, source: Table) -> bool:
    """Whether a finished packed file of this very checkpoint is there; a few of its rows are compared."""
    try:
        found, _ = read_header(target)
        if found.shape != header.shape or found.source_digest != header.source_digest:
            return False
        with closing(PackedTable(target, header.shape)) as packed:
            require_same_rows(packed, source)
    except CheckpointError:
        return False
    return True


def verify_packed(path: Path, progress: Progress | None = None) -> None:
    """Read a packed file as a whole and compare every checksum.

    Raises:
        CheckpointError: naming the rows of the first damaged block.
    """
    header, checksums = read_header(path)
    with path.open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        for block in range(header.num_blocks):
            rows, scales = unpack_blocks(path, read, header, block, int(checksums[block]))
            if progress is not None:
                progress(rows.size + scales.size)


@contextmanager
def _work_file(target: Path) -> Iterator[int]:
    """The partial file, locked: a second process waits here until the first is done or dead."""
    partial = target.with_name(target.name + ".partial")
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever had the lock may have renamed or removed the file that we opened: begin again then.
            if os.path.exists(partial) and os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _forget(target: Path) -> None:
    target.with_name(target.name + ".partial").unlink(missing_ok=True)


def _require_room(folder: Path, descriptor: int, header: PackedHeader) -> None:
    """Say before the first byte that the disk is too small."""
    disk = os.statvfs(folder)
    has = disk.f_bavail * disk.f_frsize + os.fstat(descriptor).st_blocks * 512
    if has < header.file_bytes:
        raise DeploymentError(
            str(folder),
            found=f"{has:,} bytes free",
            expected=f"{header.file_bytes:,} for the packed table of layer {header.layer_id}",
            remedy="Free some room or name another folder.",
        )


class _Packing:
    """One run over a table, from where an earlier one stopped."""

    def __init__(
        self,
        descriptor: int,
        header: PackedHeader,
        rows: TensorEntry,
        scales: TensorEntry,
        target: Path,
        progress: Progress,
    ) -> None:
        self.descriptor, self.header, self.target, self.progress = descriptor, header, target, progress
        self.sources = (_Source(rows), _Source(scales))
        self.checksums = np.zeros(header.num_blocks, dtype=np.uint32)

    def run(self) -> None:
        """Pack, finish, publish."""
        try:
            done = self._resume()
            for block in range(self.header.num_blocks):
                self._pack(block, is_done=block < done)
                if (block + 1) % SYNC_BLOCKS == 0:
                    self._sync(block + 1)
            self._finish()
        finally:
            for source in self.sources:
                source.close()

    def _resume(self) -> int:
        """Blocks of an earlier run that can be kept; the file is emptied if it was for something else."""
        try:
            found = PackedHeader.from_page(os.pread(self.descriptor, PAGE, 0), str(self.target))
        except CheckpointError:
            found = None
        fits = found is not None and replace(found, num_blocks_done=0) == self.header
        if found is None or not fits or not 0 <= found.num_blocks_done <= found.num_blocks:
            os.ftruncate(self.descriptor, 0)
            self._sync(0)
            return 0
        stored = os.pread(self.descriptor, found.num_blocks_done * 4, PAGE)
        if len(stored) != found.num_blocks_done * 4:
            return 0
        self.checksums[: found.num_blocks_done] = np.frombuffer(stored, dtype="<u4")
        return found.num_blocks_done

    def _read(self, block: int) -> tuple[Bytes, Bytes]:
        first, last = self.header.block_rows(block)
        rows, scales = (source.read(first, last) for source in self.sources)
        self.progress(rows.size + scales.size)
        return rows, scales

    def _pack(self, block: int, *, is_done: bool) -> None:
        """Write a block, unless it is done; it is read all the same, for the digests and to see that it fits."""
        content = pack_records(self.header, *self._read(block)).tobytes()
        checksum = zlib.crc32(content)
        if not is_done or checksum != self.checksums[block]:
            self.checksums[block] = checksum
            _write(self.descriptor, content, self.header.block_offset(block))

    def _sync(self, num_blocks: int) -> None:
        """Data and checksums first, then the header that counts them."""
        _write(self.descriptor, self.checksums.astype("<u4").tobytes(), PAGE)
        os.fdatasync(self.descriptor)
        _write(self.descriptor, replace(self.header, num_blocks_done=num_blocks).to_page(), 0)
        os.fdatasync(self.descriptor)

    def _finish(self) -> None:
        os.ftruncate(self.descriptor, self.header.file_bytes)
        self._sync(self.header.num_blocks)
        rows, scales = self.sources
        final = replace(
            self.header,
            num_blocks_done=self.header.num_blocks,
            rows_sha256=rows.digest.hexdigest(),
            scales_sha256=scales.digest.hexdigest(),
            checksums_sha256=checksums_digest(self.checksums),
        )
        _write(self.descriptor, final.to_page(), 0)
        os.fsync(self.descriptor)
        os.rename(self.target.with_name(self.target.name + ".partial"), self.target)
        folder = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Source:
    """A tensor read from front to back with plain reads, digested on the way."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry, self.digest = entry, hashlib.sha256()
        self._is_scale = entry.dtype == "F8_E8M0"
        try:
            self._descriptor = os.open(entry.shard, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise unreadable(entry.shard, entry.name, cause.strerror or str(cause)) from None

    def read(self, first: int, last: int) -> Bytes:
        """Rows first..last-1; CheckpointError when they cannot be had or hold a scale that is not a number."""
        width = self.entry.shape[1]
        content = read_exactly(self._descriptor, self.entry.offset + first * width, (last - first) * width, self.entry)
        self.digest.update(content)
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
        if self._is_scale and rows.max(initial=0) == _SCALE_NAN:
            row, block = divmod(int(np.flatnonzero(rows == _SCALE_NAN)[0]), width)
            raise CheckpointError(
                f"{self.entry.shard}: {self.entry.name}",
                found=f"scale byte 255 (not a number) in row {first + row}, block {block}",
                expected="a power of two, bytes 0..254",
                remedy="The weights are damaged; fetch the shard again.",
            )
        return rows

    def close(self) -> None:
        os.close(self._descriptor)


def read_exactly(descriptor: int, offset: int, length: int, entry: TensorEntry) -> bytes:
    """Bytes of a tensor's shard; CheckpointError with file and row for a short read or an error of the disk."""
    pieces, position = [], offset
    while position < offset + length:
        row = (position - entry.offset) // entry.shape[1]
        try:
            piece = os.pread(descriptor, offset + length - position, position)
        except OSError as cause:
            raise unreadable(entry.shard, f"{entry.name}, row {row}", cause.strerror or str(cause)) from None
        if not piece:
            raise unreadable(entry.shard, f"{entry.name}, row {row}", "the file ends there")
        pieces.append(piece)
        position += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
