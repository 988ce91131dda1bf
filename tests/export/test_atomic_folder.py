"""A folder appears complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engram_trt.configs.errors import ArtifactError
from engram_trt.export.atomic_folder import atomic_folder, require_replaceable


def test_the_folder_takes_its_place_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with atomic_folder(target) as folder:
        (folder / "file").write_text("content")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "file").read_text() == "content"
    assert [path.name for path in target.parent.iterdir()] == ["b"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_relative_target_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with atomic_folder(Path("out")) as folder:
        (folder / "file").touch()
    assert (tmp_path / "out" / "file").exists()


def test_an_old_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with atomic_folder(target, replace=True) as folder:
        (folder / "new").touch()
        assert (target / "old").exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()

    def write_and_fail() -> None:
        with atomic_folder(target, replace=True) as folder:
            (folder / "new").touch()
            raise error

    with pytest.raises(error):
        write_and_fail()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    real, calls = os.rename, 0

    def rename(source: Path, destination: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "Input/output error")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(ArtifactError, match="Input/output error"),
        atomic_folder(target, ArtifactError, replace=True) as folder,
    ):
        (folder / "new").touch()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="refuses"), atomic_folder(tmp_path / "file" / "out", ArtifactError):
        pass


def test_what_may_be_replaced(tmp_path: Path) -> None:
    marks = ("config.json",)
    require_replaceable(tmp_path / "absent", force=False, marks=marks)
    empty = tmp_path / "empty"
    empty.mkdir()
    require_replaceable(empty, force=False, marks=marks)
    (empty / "config.json").touch()
    with pytest.raises(ArtifactError, match="--force"):
        require_replaceable(empty, force=False, marks=marks, error=ArtifactError)
    require_replaceable(empty, force=True, marks=marks)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="a file"):
        require_replaceable(tmp_path / "link", force=True, marks=marks, error=ArtifactError)


def test_a_folder_that_came_up_in_the_meantime_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write_late() -> None:
        with atomic_folder(target, ArtifactError) as folder:
            (folder / "new").touch()
            target.mkdir()
            (target / "other").touch()

    with pytest.raises(ArtifactError, match="not empty"):
        write_late()
    assert [path.name for path in target.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
