"""One command at a time in a folder, and a disk that refuses as one clear error."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.errors import ArtifactError

_EXPECTED = {
    errno.ENOSPC: "a disk with room",
    errno.EDQUOT: "room within the quota",
    errno.EFBIG: "files of any size (`ulimit -f`)",
    errno.EROFS: "a disk that may be written to",
    errno.EACCES: "a folder that may be written to",
    errno.EPERM: "a folder that may be written to",
}


@contextmanager
def exclusively(lock_path: Path, *, place: Path, work: str, folders: Iterable[Path]) -> Iterator[None]:
    """Hold a lock for the block; the system lets go of it when the process ends, however it does.

    Args:
        lock_path: of the lock file, which stays.
        place: for messages.
        work: what another holder is doing, for messages.
        folders: made first, where they are absent.

    Raises:
        ArtifactError: another process holds the lock, or the disk refuses, before or in the block.
    """
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise disk_error(place, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ArtifactError(
            str(place), found=f"another {work} at work", expected="one at a time", remedy="Wait for it to end."
        ) from None
    try:
        yield
    except OSError as error:
        raise disk_error(place, error) from error
    finally:
        os.close(lock)


def disk_error(place: Path, error: OSError) -> ArtifactError:
    """What the system refused, and how to go on."""
    return ArtifactError(
        str(error.filename or place),
        found=f"{error.strerror or error}",
        expected=_EXPECTED.get(error.errno or 0, "a writable disk with room"),
        remedy="What was finished is kept: put it right and run the same command again.",
    )
