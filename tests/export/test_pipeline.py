"""An export is there whole or not at all; what is finished is not done again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engram_trt.configs.artifact import MANIFEST_NAME, Manifest
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, RequestError
from engram_trt.configs.limits import Limits
from engram_trt.export import work_folder as work_folder_module
from engram_trt.export.graph_store import GraphStore
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.pipeline import ExportRequest, Progress, export_checkpoint
from engram_trt.export.work_folder import work_folder

STAGES = ("engram_hash", "head")
"""Two stages that trace in seconds."""


KILLED_AT_HEAD = """
import os, signal, sys
from engram_trt.export.onnx_export import StageExporter
from engram_trt.runtime.cli import main

real = StageExporter.write

def export(self, spec, *args, **options):
    if spec.name == "head":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, spec, *args, **options)

StageExporter.write = export
main(["export", sys.argv[1], "--out", sys.argv[2], "--stages", sys.argv[3], "--no-weights"])
"""
"""The command, killed when the first stage is done and the second begins."""

GRAPHS = GraphStore(None)
"""Traced once for all tests of this file."""


def export(request: ExportRequest, progress: Progress | None = None) -> Manifest:
    return export_checkpoint(request, progress, GRAPHS)


def request(checkpoint: Path, out: Path, **changes: object) -> ExportRequest:
    values = {"checkpoint": checkpoint, "out": out, "deployment": DeploymentConfig(), "stages": STAGES, **changes}
    return ExportRequest(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "artefact"
    export(request(tiny_checkpoint, out))
    return out


def reused_stages(run: Callable[[Progress], object]) -> dict[str, bool]:
    seen: dict[str, bool] = {}
    run(Progress(stage=lambda name, reused: seen.update({name: reused})))
    return seen


def test_manifest_describes_every_file(exported: Path, tiny_checkpoint: Path) -> None:
    manifest = Manifest.read(exported)
    listed = {record.path for stage in manifest.stages for record in (stage.onnx, stage.data)}
    listed |= {record.path for record in manifest.files} | {MANIFEST_NAME}
    found = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert found - {f"stages/{name}.record.json" for name in STAGES} == listed
    for stage in manifest.stages:
        stage.onnx.verify(exported)
        stage.data.verify(exported)
    assert manifest.checkpoint_path == str(tiny_checkpoint)
    assert not [path for path in exported.parent.iterdir() if path != exported], "work files were left behind"


def test_nothing_changed_means_nothing_is_done(exported: Path, tiny_checkpoint: Path) -> None:
    before = Manifest.read(exported)
    again = reused_stages(lambda progress: export(request(tiny_checkpoint, exported), progress))
    assert again == dict.fromkeys(STAGES, True)
    assert Manifest.read(exported) == before


def test_limits_do_not_change_a_stage_but_numerics_do(exported: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    export(request(tiny_checkpoint, out, stages=("head",)))
    larger = DeploymentConfig(limits=Limits(max_batch=7))
    wider = request(tiny_checkpoint, out, stages=("head",), deployment=larger)
    assert reused_stages(lambda progress: export(wider, progress)) == {"head": True}
    assert Manifest.read(out).deployment.limits.max_batch == 7
    rounded = DeploymentConfig(activation_quantization="reference")
    other = request(tiny_checkpoint, out, stages=("head",), deployment=rounded)
    assert reused_stages(lambda progress: export(other, progress)) == {"head": False}


def test_a_killed_export_leaves_the_old_artefact_and_is_resumed(
    exported: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """SIGKILL after the first stage: the old artefact still opens; the next run keeps the finished stage."""
    out = tmp_path / "artefact"
    export(request(tiny_checkpoint, out, stages=("head",)))
    old = Manifest.read(out)
    command = [sys.executable, "-c", KILLED_AT_HEAD, str(tiny_checkpoint), str(out), ",".join(STAGES)]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert Manifest.read(out) == old
    resumed = reused_stages(lambda progress: export(request(tiny_checkpoint, out, weights=False), progress))
    assert resumed["engram_hash"] is True
    assert {stage.spec.name for stage in Manifest.read(out).stages} == set(STAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["artefact"]


def test_a_full_disk_loses_nothing(
    exported: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artefact"
    real = StageExporter.write

    def full(self: object, spec: object, *args: object, **options: object) -> object:
        if spec.name == "head":  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, spec, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(StageExporter, "write", full)
    with pytest.raises(ArtifactError, match=r"No space left.*run the same command again"):
        export(request(tiny_checkpoint, out))
    assert not out.exists()
    monkeypatch.undo()
    resumed = reused_stages(lambda progress: export(request(tiny_checkpoint, out), progress))
    assert resumed == {"engram_hash": True, "head": False}


def test_too_little_room_is_said_before_the_first_byte(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_folder_module.shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(
        ArtifactError, match=r"found 1,000 bytes free; expected [0-9,]+ for what is still to be written"
    ):
        export(request(tiny_checkpoint, tmp_path / "artefact"))


class _Usage:
    free = 1000


def test_one_export_at_a_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "artefact"
    with (
        work_folder(out),
        pytest.raises(ArtifactError, match="another export at work"),
    ):
        export(request(tiny_checkpoint, out))


def test_a_foreign_folder_is_not_replaced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "aunt.txt").write_text("Dear aunt")
    with pytest.raises(ArtifactError, match="no artefact"):
        export(request(tiny_checkpoint, tmp_path / "letters"))
    assert (tmp_path / "letters" / "aunt.txt").read_text() == "Dear aunt"


def test_unknown_stage(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="block_99"):
        export(request(tiny_checkpoint, tmp_path / "artefact", stages=("head", "block_99")))


def test_data_files_of_zeros_have_full_size(exported: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "zeros"
    export(request(tiny_checkpoint, out, weights=False))
    full = {stage.spec.name: stage.data.num_bytes for stage in Manifest.read(exported).stages}
    zeros = Manifest.read(out)
    assert {stage.spec.name: stage.data.num_bytes for stage in zeros.stages} == full
    head = out / "stages" / "head.data"
    assert not any(head.read_bytes())
    assert head.stat().st_blocks * 512 < head.stat().st_size
    assert not zeros.has_weights


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"batch"', '"hatch"', 1), "changed after it was written"),
        (lambda text: json.dumps({**json.loads(text), "version": 99}), r"version 99; expected .* version 1"),
        (lambda text: text[: len(text) // 2], "no valid JSON"),
        (lambda text: "[]", "a JSON list"),
    ],
)
def test_a_manifest_edited_by_hand(exported: Path, tmp_path: Path, damage: Callable[[str], str], message: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(damage((exported / MANIFEST_NAME).read_text()))
    with pytest.raises(ArtifactError, match=message):
        Manifest.read(tmp_path)
