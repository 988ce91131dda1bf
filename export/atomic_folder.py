"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.errors import UserError


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    partial_path = path.with_name(f"{path.name}.partial")
    with partial_path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial_path.replace(path)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file and wait until it is on the disk."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def require_replaceable(
    target: Path, *, force: bool, marks: Collection[str], error: type[UserError] = UserError
) -> None:
    """Check, before any work, that a folder may be written at `target`.

    Args:
        target: an absent path or an empty folder; with `force` also a folder that holds all of `marks`.
        force: whether an earlier result may be replaced.
        marks: file names that tell such a result from other people's files.
        error: the class to raise.

    Raises:
        UserError: of the class `error`, when something there would be lost.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise error(str(target), found="a file", expected="a folder to write", remedy="Name another path.")
    names = {entry.name for entry in target.iterdir()}
    if not names or (force and names.issuperset(marks)):
        return
    raise error(
        str(target),
        found="a folder that is not empty" if not force else f"a folder without {', '.join(marks)}",
        expected="an empty or absent folder" if not force else "an earlier result to replace",
        remedy="Name another path" + (", or pass --force to replace an earlier result." if not force else "."),
    )


@contextmanager
def atomic_folder(target: Path, error: type[UserError] = UserError, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends well.

    When the block raises, the temporary folder is removed and `target` is as it was.

    Args:
        target: the final path.
        error: the class to raise.
        replace: whether a folder with files at `target` gives way. It is moved aside first and deleted last, so
            that a crash leaves the old one, the new one, or for an instant the old one under its temporary name.

    Raises:
        UserError: of the class `error`, when the file system refuses (no room, read-only, ...).
    """
    target = Path(os.path.abspath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as cause:
        raise _refused(target, cause, error) from None
    try:
        yield folder
        folder.chmod(0o755)
        sync_folder(folder)
        _take_place(folder, target, replace=replace)
    except OSError as cause:
        shutil.rmtree(folder, ignore_errors=True)
        raise _refused(target, cause, error) from cause
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _take_place(folder: Path, target: Path, *, replace: bool) -> None:
    aside = folder.with_name(folder.name.replace(".partial-", ".replaced-"))
    # Without `replace` the rename itself refuses a folder with files, also one that came up in the meantime.
    had_target = replace and os.path.lexists(target)
    if had_target:
        os.rename(target, aside)
    try:
        os.rename(folder, target)
    except OSError:
        if had_target:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)
    if had_target:
        shutil.rmtree(aside, ignore_errors=True)


def _refused(target: Path, cause: OSError, error: type[UserError]) -> UserError:
    return error(
        str(target),
        found=f"a file system that refuses ({cause.strerror or cause})",
        expected="a writable folder with enough room",
        remedy="Nothing was changed there. Free some room or name another path.",
    )
