"""A file written once, front to back, whose digest is known when it ends."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

_ZEROS = bytes(1 << 20)
_COPY_BYTES = 8 << 20

Buffer = bytes | bytearray | memoryview


_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of that name; None where there is none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with bytes that were just written, so that the last sync does not wait for all of them."""
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


class DigestedWriter:
    """Writes a file and digests the same bytes meanwhile, on a thread of its own; one piece is in flight at a time.

    Args:
        path: written anew.

    Raises:
        OSError: the disk is full, the quota used up, or the folder not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._last: Future[None] | None = None
        self._file: BinaryIO = path.open("wb", buffering=0)

    def write(self, data: Buffer) -> None:
        """Append bytes, which must not change until the next call returns."""
        view = memoryview(data).cast("B")
        self._wait()
        self._last = self._pool.submit(self._digest.update, view)
        start = self.num_bytes
        while view:
            view = view[self._file.write(view) :]
        self.num_bytes += memoryview(data).nbytes
        start_writeback(self._file.fileno(), start, self.num_bytes - start)

    def skip(self, num_bytes: int) -> None:
        """Append zeros as a hole, which takes no room on file systems that have such."""
        self._wait()
        for start in range(0, num_bytes, len(_ZEROS)):
            self._digest.update(memoryview(_ZEROS)[: min(len(_ZEROS), num_bytes - start)])
        self.num_bytes += num_bytes
        self._file.truncate(self.num_bytes)
        self._file.seek(self.num_bytes)

    def finish(self) -> str:
        """Make everything durable; the SHA-256 (hex) of the file."""
        self._wait()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> DigestedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._file.close()


def copy_digested(source: Path, target: Path) -> str:
    """Copy a file and wait until it is on the disk; the SHA-256 (hex) of what was copied.

    Raises:
        OSError: one cannot be read, the other not be written.
    """
    with source.open("rb", buffering=0) as file, DigestedWriter(target) as copy:
        while block := file.read(_COPY_BYTES):
            copy.write(block)
        return copy.finish()
