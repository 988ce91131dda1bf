"""The folder in which an artefact grows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.artifact import MANIFEST_NAME
from engram_trt.configs.errors import ArtifactError
from engram_trt.export.exclusive import exclusively
from engram_trt.export.residents import RESIDENTS_FOLDER
from engram_trt.export.stage_records import STAGES_FOLDER


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
    folders = [work / name for name in (STAGES_FOLDER, RESIDENTS_FOLDER)]
    with exclusively(lock_path, place=work, work="export", folders=folders):
        yield work
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
