"""What tells one state of a file from another, without reading it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Place, size and time of the last change of a file.

    A file with the same identity has not been written to since, as far as the file system can tell.
    """

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """From a stat result."""
        return cls(device=found.st_dev, inode=found.st_ino, num_bytes=found.st_size, mtime_ns=found.st_mtime_ns)
