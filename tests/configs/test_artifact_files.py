"""What a file of an artefact may be: regular, inside, with one name, of the recorded size and content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engram_trt.configs.artifact import FileRecord
from engram_trt.configs.errors import ArtifactError

CONTENT = b"weights"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    root = tmp_path / "artefact"
    (root / "stages").mkdir(parents=True)
    (root / "stages" / "head.data").write_bytes(CONTENT)
    return root


def record(path: str = "stages/head.data") -> FileRecord:
    return FileRecord(path=path, num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


def test_a_good_file_is_verified(artifact: Path) -> None:
    assert record().verify(artifact).read_bytes() == CONTENT
    assert FileRecord.of(artifact, artifact / "stages" / "head.data") == record()


def hard_link(file: Path) -> None:
    os.link(file, file.with_name("other"))


def link_outside(file: Path) -> None:
    outside = file.parents[2] / "outside"
    file.rename(outside)
    file.symlink_to(outside)


def linked_folder(file: Path) -> None:
    """The parent is a link out of the artefact, the file itself is a plain one."""
    outside = file.parents[2] / "elsewhere"
    file.parent.rename(outside)
    file.parent.symlink_to(outside)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (hard_link, "2 hard links"),
        (link_outside, "a link out of the artefact"),
        (linked_folder, "a link out of the artefact"),
        (pipe, "no regular file"),
        (folder, "no regular file"),
        (loop, "no such file"),
        (Path.unlink, "no such file"),
        (lambda file: file.write_bytes(CONTENT[:-1]), "6 bytes"),
        (lambda file: file.write_bytes(CONTENT[::-1]), "SHA-256"),
    ],
)
def test_what_is_refused(artifact: Path, damage: Callable[[Path], object], found: str) -> None:
    damage(artifact / "stages" / "head.data")
    with pytest.raises(ArtifactError) as caught:
        record().verify(artifact)
    assert found in caught.value.found
    assert "head.data" in caught.value.where


def test_a_device_is_refused(artifact: Path) -> None:
    """Through a link inside the artefact, as making a device needs rights a test may not have."""
    (artifact / "stages" / "head.data").unlink()
    (artifact / "stages" / "head.data").symlink_to("/dev/null")
    with pytest.raises(ArtifactError, match=r"link out of the artefact|no regular file"):
        record().locate(artifact)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "stages/../../secret"])
def test_a_path_that_leaves_the_artefact_is_refused(artifact: Path, path: str) -> None:
    (artifact.parent / "secret").write_bytes(CONTENT)
    with pytest.raises(ArtifactError, match="a path inside the artefact"):
        record(path).locate(artifact)
