"""Engram tables in host memory: checked for room before the first byte, filled in parallel, shared by processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engram_trt.configs.errors import DeploymentError
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.runtime.engram.files import Bytes, unreadable
from engram_trt.runtime.engram.memory import available_memory, numa_nodes, pin, require_memory, unpin
from engram_trt.runtime.engram.packed import read_header, unpack_blocks
from engram_trt.runtime.engram.progress import byte_bar
from engram_trt.runtime.engram.scales import SCALE_NAN, scale_error
from engram_trt.runtime.engram.tables import SCALES_DTYPE, MemoryTable, TableShape

SHARED_FOLDER = Path("/dev/shm")
BAR_BYTES = 1 << 30
"""A fill of at least so much shows a progress bar on a terminal."""
_PART_BYTES = 16 << 20
_COMPLETE = b"complete"

Part = Callable[[], int]
"""Fills a piece of a table; returns the bytes."""


class HostTable(MemoryTable):
    """A table in memory.

    Args:
        shape: what it holds.
        memory: uint8 [at least num_bytes]: all rows, then all scales.
        is_shared: other processes have the same copy.
        on_close: gives the memory back.
    """

    def __init__(
        self, shape: TableShape, memory: Bytes, *, is_shared: bool, on_close: Callable[[], None] | None = None
    ) -> None:
        self.memory, self.is_shared, self._on_close = memory, is_shared, on_close
        super().__init__(shape, *_split(shape, memory))
        self.is_pinned = pin(memory)

    def facts(self) -> dict[str, Any]:
        return {
            "shared": self.is_shared,
            "pinned": self.is_pinned,
            "numa_pages": numa_nodes(self.memory),
        }

    def close(self) -> None:
        if self.is_pinned:
            unpin(self.memory)
            self.is_pinned = False
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


def _split(shape: TableShape, memory: Bytes) -> tuple[Bytes, Bytes]:
    cut = shape.num_rows * shape.row_bytes
    rows = memory[:cut].reshape(shape.num_rows, shape.row_bytes)
    return rows, memory[cut : shape.num_bytes].reshape(shape.num_rows, shape.scale_bytes)


def load_host_table(
    shape: TableShape,
    parts_of: Callable[[Bytes, Bytes], list[Part]],
    *,
    identity: str,
    num_threads: int,
    share: bool,
) -> HostTable:
    """Fill a table, or attach to the copy that another process has filled.

    Args:
        shape: what it holds.
        parts_of: (rows, scales) -> the pieces of work that fill them.
        identity: names the content; processes with one identity share one copy.
        num_threads: threads that fill.
        share: put it in `/dev/shm`.

    Raises:
        DeploymentError: there is too little memory; said before anything is read.
        CheckpointError: the source cannot be read.
    """
    if share:
        return _load_shared(shape, parts_of, identity, num_threads)
    require_memory(shape.num_bytes, available_memory())
    memory = np.frombuffer(mmap.mmap(-1, shape.num_bytes), dtype=np.uint8)
    _fill(shape, memory, parts_of, num_threads)
    return HostTable(shape, memory, is_shared=False)


def _load_shared(
    shape: TableShape, parts_of: Callable[[Bytes, Bytes], list[Part]], identity: str, num_threads: int
) -> HostTable:
    """One file for all processes. Users hold a shared lock on it; the last one out removes it.

    The file ends in a mark that is written when all is filled, so that what a killed process left is filled anew.
    """
    name = hashlib.sha256(f"{identity}\0{shape}".encode()).hexdigest()[:24]
    path = SHARED_FOLDER / f"engram-trt-{os.getuid()}-{name}"
    size = shape.num_bytes + len(_COMPLETE)
    try:
        descriptor = _lock_exclusive(path)
        try:
            if os.fstat(descriptor).st_size != size:
                disk = os.statvfs(SHARED_FOLDER)
                require_memory(shape.num_bytes, min(available_memory(), disk.f_bavail * disk.f_frsize))
                os.ftruncate(descriptor, size)
            memory = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
            if memory[shape.num_bytes :].tobytes() != _COMPLETE:
                os.posix_fallocate(descriptor, 0, size)  # "no room" now is an error, later a signal
                _fill(shape, memory, parts_of, num_threads)
                memory[shape.num_bytes :] = np.frombuffer(_COMPLETE, dtype=np.uint8)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException:
            _leave(path, descriptor)
            raise
    except OSError as cause:
        raise DeploymentError(
            str(path),
            found=f"shared memory that cannot be had ({cause.strerror or cause})",
            expected=f"{size:,} bytes in {SHARED_FOLDER}",
            remedy="Enlarge it, or set engram.share_host = false.",
        ) from None
    return HostTable(shape, memory, is_shared=True, on_close=lambda: _leave(path, descriptor))


def _lock_exclusive(path: Path) -> int:
    """Open with a lock that no one else has while filling; users of a filled table are let in again after it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "a file of another user")
        # A filled table is in use under shared locks: take one too and look. An unfinished one needs it alone.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_current(path, descriptor):
            if _is_complete(descriptor):
                return descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(path, descriptor):
                return descriptor
        os.close(descriptor)


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_complete(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > len(_COMPLETE) and os.pread(descriptor, len(_COMPLETE), size - len(_COMPLETE)) == _COMPLETE


def _leave(path: Path, descriptor: int) -> None:
    """Give the lock back; remove the file when no other process holds one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current(path, descriptor):
            path.unlink()
    except BlockingIOError:
        pass  # another process still uses it, and will remove it
    finally:
        os.close(descriptor)


def _fill(shape: TableShape, memory: Bytes, parts_of: Callable[[Bytes, Bytes], list[Part]], num_threads: int) -> None:
    parts = parts_of(*_split(shape, memory))
    bar = byte_bar(f"Engram table of layer {shape.layer_id}", shape.num_bytes, smallest=BAR_BYTES)
    with bar as advance, ThreadPoolExecutor(num_threads, thread_name_prefix="engram-fill") as pool:
        futures = [pool.submit(_run_part, part, advance) for part in parts]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()


def _run_part(part: Part, advance: Callable[[int], None]) -> None:
    advance(part())


def shard_parts(entries: tuple[TensorEntry, TensorEntry], rows: Bytes, scales: Bytes) -> list[Part]:
    """Pieces of work that read a table from its shards with plain reads."""
    parts: list[Part] = []
    for entry, target in zip(entries, (rows, scales), strict=True):
        flat = target.reshape(-1)
        for start in range(0, flat.size, _PART_BYTES):
            piece = flat[start : start + _PART_BYTES]
            parts.append(partial(_read_piece, entry, start, piece))
    return parts


def _read_piece(entry: TensorEntry, start: int, piece: Bytes) -> int:
    width, done = entry.shape[1], 0
    try:
        descriptor = os.open(entry.shard, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < piece.size:
                count = os.preadv(descriptor, [piece[done:].data], entry.offset + start + done)
                if count == 0:
                    raise unreadable(entry.shard, f"{entry.name}, row {(start + done) // width}", "the file ends there")
                done += count
        finally:
            os.close(descriptor)
    except OSError as cause:
        where = f"{entry.name}, row {(start + done) // width}"
        raise unreadable(entry.shard, where, cause.strerror or str(cause)) from None
    if entry.dtype == SCALES_DTYPE and piece.max(initial=0) == SCALE_NAN:
        row, block = divmod(start + int(np.flatnonzero(piece == SCALE_NAN)[0]), width)
        raise scale_error(f"{entry.shard}: {entry.name}", row, block)
    return piece.size


def packed_parts(path: Path, rows: Bytes, scales: Bytes) -> list[Part]:
    """Pieces of work that read a table from a packed file, every checksum compared."""
    header, checksums = read_header(path)

    def fill(block: int) -> int:
        with path.open("rb") as file:

            def read(offset: int, length: int) -> bytes:
                return os.pread(file.fileno(), length, offset)

            first, last = header.block_rows(block)
            rows[first:last], scales[first:last] = unpack_blocks(path, read, header, block, int(checksums[block]))
        return (last - first) * header.shape.record_bytes

    return [partial(fill, block) for block in range(header.num_blocks)]
