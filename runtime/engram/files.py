"""Mapped files whose pages are made present before they are touched, so that a bad disk is an error, not a signal.

Touching a mapped page that cannot be read kills the process (SIGBUS). `MADV_POPULATE_READ` reads the same page
and says so instead; `process_madvise` does it for a thousand ranges a call. What remains is a race: a page that
was populated can be evicted, or its file cut short, before the copy a moment later. Pages of a small fetch are
populated anew every time, which leaves microseconds; pages of a large one only if this process never had them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.file_identity import FileIdentity

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

PAGE_BYTES = mmap.PAGESIZE
_PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
SMALL_FETCH = 1024
"""So many rows are populated without asking what is known of them."""
_CALL_RANGES = 1024
"""Ranges of one system call: the kernel's UIO_MAXIOV."""

_SYS_PROCESS_MADVISE = 440
_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22


class UnreadablePageError(Exception):
    """A range of a mapped file cannot be made present.

    Args:
        index: which of the ranges that were asked for.
        reason: what the system said.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"range {index}: {reason}")
        self.index, self.reason = index, reason


def unreadable(path: Path, what: str, reason: str) -> CheckpointError:
    """The error for a part of a weight file that cannot be had."""
    return CheckpointError(
        f"{path}: {what}",
        found=f"bytes that cannot be read ({reason})",
        expected="the file as it was opened",
        remedy="Check the disk and that nobody changes the checkpoint while it is in use.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Ranges that were requested.

    Attributes:
        ranges: int64 [n, 2], address of the first page and length from there: what the kernel calls an iovec.
        pages: [2, n], first and last pages of the file; None where all are known.
        indices: which of the ranges that were asked for; None for all.
    """

    ranges: Offsets
    pages: Offsets | None
    indices: Offsets | None


class MappedFile:
    """A read-only file, mapped whole, without read-ahead.

    Args:
        path: the file.
        num_bytes: its size; another one is refused.

    Raises:
        CheckpointError: absent, unreadable, or of another size.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self._name = path, os.fspath(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise unreadable(path, "the file", cause.strerror or str(cause)) from None
        try:
            self.identity = FileIdentity.of(os.fstat(self._descriptor))
            if self.identity.num_bytes != num_bytes:
                raise _changed(path, f"{self.identity.num_bytes:,} bytes", f"{num_bytes:,}")
            self._map = mmap.mmap(self._descriptor, num_bytes, prot=mmap.PROT_READ)
            self._map.madvise(mmap.MADV_RANDOM)
        except OSError as cause:
            os.close(self._descriptor)
            raise unreadable(path, "the file", cause.strerror or str(cause)) from None
        except BaseException:
            os.close(self._descriptor)
            raise
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        # Zeros cost no memory until written: a table of 101 GB has 25 million pages.
        self._known = np.zeros(-(-num_bytes // PAGE_BYTES), dtype=np.bool_)
        self._address = int(self.bytes.ctypes.data)
        self._advice = _Advice(self._descriptor, self._address)

    def check(self) -> None:
        """Refuse a file that was cut, replaced or written to since it was opened; one `stat`.

        Raises:
            CheckpointError: naming what changed.
        """
        try:
            found = FileIdentity.of(os.stat(self._name))
        except OSError as cause:
            raise unreadable(self.path, "the file", cause.strerror or str(cause)) from None
        if found == self.identity:
            return
        if found.num_bytes != self.identity.num_bytes:
            raise _changed(self.path, f"{found.num_bytes:,} bytes", f"{self.identity.num_bytes:,}")
        what = "another file" if found.inode != self.identity.inode else "a file that was written to"
        raise _changed(self.path, what, "the one that was opened")

    def require(self, offsets: Offsets, num_bytes: int) -> None:
        """Make [offset, offset + num_bytes) present for every offset.

        Args:
            offsets: [n] byte offsets.
            num_bytes: length of each range.

        Raises:
            UnreadablePageError: with the index of the first range that cannot be read.
        """
        self.populate(self.request(offsets, num_bytes))

    def request(self, offsets: Offsets, num_bytes: int | Offsets) -> Pending | None:
        """Start reading what is not known to be present, all at once.

        Args:
            offsets: [n], or [m, n] for m ranges of each of n rows; numbered as they lie in memory.
            num_bytes: length of each range, less than a page; or [m, 1], one for each of the m.

        Returns:
            what `populate` has to wait for; None if that is nothing.
        """
        # Every step runs through here, beside the stages that need the processor: few calls, not clear ones.
        pages = np.empty((2, *offsets.shape), dtype=np.int64)
        np.right_shift(offsets, _PAGE_SHIFT, out=pages[0])
        np.add(offsets, num_bytes - 1, out=pages[1])
        np.right_shift(pages[1], _PAGE_SHIFT, out=pages[1])
        known = self._known[pages]
        is_all_known, is_small = bool(known.all()), offsets.shape[-1] <= SMALL_FETCH
        if is_all_known and not is_small:
            return None
        ranges = np.empty((*offsets.shape, 2), dtype=np.int64)
        address, length = ranges[..., 0], ranges[..., 1]
        np.bitwise_and(offsets, PAGE_BYTES - 1, out=length)
        np.subtract(offsets, length, out=address)
        np.add(address, self._address, out=address)
        np.add(length, num_bytes, out=length)
        ranges = ranges.reshape(-1, 2)
        if is_all_known:
            return Pending(ranges=ranges, pages=None, indices=None)
        pages = pages.reshape(2, -1)
        unknown = np.flatnonzero(~(known[0] & known[1]))
        asked = pages[:, unknown]
        # Neighbours in an ascending order often lie in one page.
        is_new = np.ones(unknown.size, dtype=np.bool_)
        np.any(asked[:, 1:] != asked[:, :-1], axis=0, out=is_new[1:])
        unknown = unknown[is_new]
        self._advice.start_reading(ranges[unknown])
        if is_small:
            return Pending(ranges=ranges, pages=pages, indices=None)
        return Pending(ranges=ranges[unknown], pages=pages[:, unknown], indices=unknown)

    def populate(self, pending: Pending | None) -> None:
        """Wait until requested ranges are present; see `require`."""
        if pending is None:
            return
        try:
            self._advice.populate(pending.ranges)
        except UnreadablePageError as error:
            index = error.index if pending.indices is None else int(pending.indices[error.index])
            raise UnreadablePageError(index, error.reason) from None
        if pending.pages is not None:
            self._known[pending.pages] = True

    def close(self) -> None:
        """Give the descriptor back; the map goes with the last array that looks into it."""
        os.close(self._descriptor)


def _changed(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        found=found,
        expected=f"{expected}, as when it was opened",
        remedy="Do not change a checkpoint while it is in use; start again.",
    )


class _Advice:
    """The system calls, in the best form that this kernel has; tests put failures in here."""

    def __init__(self, descriptor: int, address: int) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._descriptor, self._address = descriptor, address
        self._process = _process_descriptor(os.getpid())

    def start_reading(self, ranges: Offsets) -> None:
        """Let the kernel read in the background; it is a hint, and its failures show in `populate`."""
        if self._process is None:
            for start, length in ranges.tolist():
                os.posix_fadvise(self._descriptor, start - self._address, length, os.POSIX_FADV_WILLNEED)
            return
        for start in range(0, len(ranges), _CALL_RANGES):
            self._batch(ranges[start : start + _CALL_RANGES], _MADV_WILLNEED)

    def populate(self, ranges: Offsets) -> None:
        """Read and map all ranges; UnreadablePageError with the index of the first that fails."""
        done = 0
        while self._process is not None and done < len(ranges):
            batch = ranges[done : done + _CALL_RANGES]
            advised = self._batch(batch, _MADV_POPULATE_READ)
            if advised == np.add.reduce(batch[:, 1]):
                done += len(batch)
                continue
            # The one at fault is tried alone below, where its own error can be read.
            done += int(np.searchsorted(np.cumsum(batch[:, 1]), max(advised, 0), side="right"))
            self._one(done, *ranges[done].tolist())
            done += 1
        for index in range(done, len(ranges)):
            self._one(index, *ranges[index].tolist())

    def _batch(self, ranges: Offsets, advice: int) -> int:
        """Bytes advised, or a negative number."""
        pointer, count = ctypes.c_void_p(ranges.__array_interface__["data"][0]), ctypes.c_size_t(len(ranges))
        return int(self._libc.syscall(_SYS_PROCESS_MADVISE, self._process, pointer, count, advice, 0))

    def _one(self, index: int, address: int, length: int) -> None:
        while True:
            call = ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_READ
            if self._libc.madvise(*call) == 0:
                return
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14
                self._read_pages(index, address - self._address, length)
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                reason = "past the end of the file, or an error of the disk" if code == errno.EFAULT else ""
                raise UnreadablePageError(index, reason or os.strerror(code))

    def _read_pages(self, index: int, start: int, length: int) -> None:
        """Bring pages into the page cache by reading a byte of each, where there is no better way."""
        for offset in range(start, start + length, PAGE_BYTES):
            try:
                found = os.pread(self._descriptor, 1, offset)
            except OSError as cause:
                raise UnreadablePageError(index, cause.strerror or str(cause)) from None
            if not found:
                raise UnreadablePageError(index, "past the end of the file")


@lru_cache(maxsize=1)
def _process_descriptor(pid: int) -> int | None:
    """A descriptor of this process for `process_madvise`, or None where it may not populate (before Linux 6.13)."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    probe = np.zeros(2 * PAGE_BYTES, dtype=np.uint8)
    start = -(-probe.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    vector = np.array([[start, PAGE_BYTES]], dtype=np.uint64)
    pointer, one = ctypes.c_void_p(vector.ctypes.data), ctypes.c_size_t(1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_PROCESS_MADVISE, process, pointer, one, _MADV_POPULATE_READ, 0) == PAGE_BYTES:
        return process
    os.close(process)
    return None
