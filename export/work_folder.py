"""The folder in which an artefact grows: one export at a time, and a disk that refuses is one clear error."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.artifact import MANIFEST_NAME
from engram_trt.configs.errors import ArtifactError
from engram_trt.export.residents import RESIDENTS_FOLDER
from engram_trt.export.stage_records import STAGES_FOLDER

_EXPECTED = {
    errno.ENOSPC: "a disk with room",
    errno.EDQUOT: "room within the quota",
    errno.EROFS: "a disk that may be written to",
    errno.EACCES: "a folder that may be written to",
    errno.EPERM: "a folder that may be written to",
}


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """The folder beside `out` in which its successor grows; one export at a time may use it.

    Raises:
        ArtifactError: another export is at work there, `out` is something else, or the disk refuses.
    """
    out = Path(os.path.abspath(out))
    require_artifact_or_nothing(out)
    work = out.with_name(f".{out.name}.export")
    lock_path = work.with_name(f"{work.name}.lock")
    try:
        for folder in (STAGES_FOLDER, RESIDENTS_FOLDER):
            (work / folder).mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise disk_error(work, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ArtifactError(
            str(work), found="another export at work", expected="one at a time", remedy="Wait for it to end."
        ) from None
    try:
        yield work
    except OSError as error:
        raise disk_error(work, error) from error
    finally:
        os.close(lock)
    lock_path.unlink(missing_ok=True)


def require_artifact_or_nothing(out: Path) -> None:
    """Refuse to replace anything but an artefact."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).is_file())):
        raise ArtifactError(
            str(out),
            found="a file or folder that is no artefact",
            expected="an absent or empty folder, or an artefact to replace",
            remedy="Choose another --out.",
        )


def require_space(folder: Path, needed: int) -> None:
    """Refuse before the first byte if that many cannot fit."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            str(folder.parent),
            found=f"{free:,} bytes free",
            expected=f"{needed:,} for what is still to be written",
            remedy="Free some room or choose another --out; `--dry-run` lists every file.",
        )


def disk_error(work: Path, error: OSError) -> ArtifactError:
    """What the system refused, and how to go on."""
    return ArtifactError(
        str(error.filename or work),
        found=f"{error.strerror or error}",
        expected=_EXPECTED.get(error.errno or 0, "a writable disk with room"),
        remedy="What was finished is kept: put it right and run the same command again.",
    )
