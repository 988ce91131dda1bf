"""Copied experts, single layers, dry runs, processes; and what a disk or a checkpoint does in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engram_trt.configs.artifact import Manifest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, CheckpointError
from engram_trt.export import stage_pool, work_folder
from engram_trt.export.dry_run import planned_files
from engram_trt.export.graph_store import GraphStore, default_folder
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.pipeline import ExportRequest, Progress, export_checkpoint
from engram_trt.export.write_limits import OWN_BYTES, WORKER_BYTES, WORTH_A_POOL, WriteLimits
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cli import main
from engram_trt.runtime.resident_weights import ResidentWeights

GRAPHS = GraphStore(default_folder())
LAYER = 3
"""A reader of ratio 2: the smallest kind of block with everything but an indexer."""


def request(checkpoint: Path, out: Path, **changes: object) -> ExportRequest:
    values = {"checkpoint": checkpoint, "out": out, "deployment": DeploymentConfig(), "layers": (LAYER,), **changes}
    return ExportRequest(**values)  # type: ignore[arg-type]


def export(*arguments: object, progress: Progress | None = None, **changes: object) -> Manifest:
    return export_checkpoint(request(*arguments, **changes), progress, GRAPHS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def copied(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("copied") / "artefact"
    export(tiny_checkpoint, out, copy_experts=True)
    return out


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


# --- copies -----------------------------------------------------------------------------------------------


def test_copied_experts_are_the_checkpoint_s_stacked(copied: Path, tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    manifest = Manifest.read(copied)
    assert [stage.spec.layer_id for stage in manifest.stages] == [LAYER]
    assert len(manifest.residents) == 6
    for record in manifest.residents:
        assert record.copy is not None
        matrix, _, scale = record.key.rpartition(".")[2].removeprefix("experts_").partition("_")
        names = [f"layers.{LAYER}.ffn.experts.{e}.{matrix}.{scale or 'weight'}" for e in range(record.shape[0])]
        expected = b"".join(checkpoint.bytes(name).tobytes() for name in names)
        content = (copied / record.copy.path).read_bytes()
        assert content == expected
        assert record.sha256 == record.copy.sha256 == hashlib.sha256(expected).hexdigest()


def test_a_copy_is_mapped_and_stands_alone(copied: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With the checkpoint gone, an artefact whose residents are all copies still opens."""
    manifest = Manifest.read(copied)
    weights = ResidentWeights(copied, manifest, None)
    key = f"layers.{LAYER}.experts_w2"
    mapped = weights.array(key)
    assert isinstance(mapped, np.memmap)
    assert mapped.shape == weights.record(key).shape
    out = tmp_path / "alone"
    lent = Path(shutil.copytree(tiny_checkpoint, tmp_path / "lent"))
    export(lent, out, copy_experts=True)
    shutil.rmtree(lent)
    artifact = Artifact.open(out)
    np.testing.assert_array_equal(artifact.residents.array(key), mapped)
    with pytest.raises(CheckpointError, match="Say where it is with --checkpoint"):
        _ = artifact.checkpoint


def test_without_copies_experts_are_stacked_at_load(tiny_checkpoint: Path, copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "artefact"
    export(tiny_checkpoint, out)
    artifact = Artifact.open(out, verify="full")
    for record in artifact.manifest.residents:
        assert record.copy is None
        stacked = artifact.residents.array(record.key)
        assert not isinstance(stacked, np.memmap)
        expected = ResidentWeights(copied, Manifest.read(copied), None).array(record.key)
        np.testing.assert_array_equal(stacked, expected)


def test_copies_are_made_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "artefact", []
    export(tiny_checkpoint, out, copy_experts=True)
    again = export(tiny_checkpoint, out, copy_experts=True, progress=Progress(written=moved.append))
    assert moved == []
    assert again == Manifest.read(out)
    export(tiny_checkpoint, out, progress=Progress(written=moved.append))
    assert Manifest.read(out).residents[0].copy is None
    assert not list((out / "residents").glob("*.bin"))


def test_an_interrupted_copy_is_resumed_where_it_stopped(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_trt.export import pipeline

    real, copies = pipeline.copy_resident, []

    def stop_at_the_third(*arguments: object, **options: object) -> str:
        copies.append(arguments[1].key)  # type: ignore[attr-defined]
        if len(copies) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "copy_resident", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        export(tiny_checkpoint, tmp_path / "artefact", copy_experts=True)
    assert not (tmp_path / "artefact").exists()
    export(tiny_checkpoint, tmp_path / "artefact", copy_experts=True)
    assert len(copies) == 3 + 4
    assert copies[2] == copies[3]


# --- dry run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"copy_experts": True}, {}, {"weights": False, "copy_experts": True}])
def test_a_dry_run_lists_every_file_with_its_size(
    tiny_checkpoint: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    out = tmp_path / "artefact"
    planned = {file.path: file.num_bytes for file in planned_files(request(tiny_checkpoint, out, **changes), GRAPHS)}
    assert not list(tmp_path.iterdir())
    export(tiny_checkpoint, out, **changes)
    found = {path.relative_to(out).as_posix(): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert planned == found


def test_the_command_lists_and_writes_nothing(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(tiny_checkpoint), "--out", str(tmp_path / "out"), "--layers", str(LAYER), "--dry-run"]
    assert main(command) == 0
    assert "manifest.json" in capsys.readouterr().out
    assert main([*command, "--copy-experts", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == sum(size for _, size in document["files"])
    assert not list(tmp_path.iterdir())


def test_the_command_reports_bytes_and_rate(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        main(["export", str(tiny_checkpoint), "--out", str(out), "--layers", str(LAYER), "--copy-experts", "--json"])
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.suffix in (".data", ".bin"))
    assert 0 <= written - facts["moved_bytes"] < 4096 * 40, "all but padding"
    assert facts["bytes_per_s"] > 0


# --- several processes ------------------------------------------------------------------------------------


def test_processes_follow_the_work_and_the_memory() -> None:
    limits = WriteLimits(memory_bytes=OWN_BYTES + 3 * WORKER_BYTES)
    assert limits.workers(40, WORTH_A_POOL - 1) == 1
    assert WriteLimits(jobs=8, memory_bytes=limits.memory_bytes).workers(40, 1) == 3
    assert WriteLimits(jobs=8, memory_bytes=64 * WORKER_BYTES).workers(2, WORTH_A_POOL) == 2
    assert WriteLimits(jobs=1).workers(40, 10 * WORTH_A_POOL) == 1


def test_stages_written_by_processes_are_the_same(tiny_checkpoint: Path, tmp_path: Path) -> None:
    alone = export(tiny_checkpoint, tmp_path / "alone", layers=(LAYER, LAYER + 2))
    spread = export(tiny_checkpoint, tmp_path / "spread", layers=(LAYER, LAYER + 2), limits=WriteLimits(jobs=2))
    assert [stage.data.sha256 for stage in alone.stages] == [stage.data.sha256 for stage in spread.stages]
    assert [stage.onnx.sha256 for stage in alone.stages] == [stage.onnx.sha256 for stage in spread.stages]


def test_a_damaged_weight_is_named_by_whichever_process_reads_it(checkpoint: Path, tmp_path: Path) -> None:
    entry = Checkpoint.open(checkpoint).entry(f"layers.{LAYER}.attn.wq_a.scale")
    with entry.shard.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff")
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, tmp_path / "artefact", layers=(LAYER, LAYER + 2), limits=WriteLimits(jobs=2))
    assert caught.value.where == f"{entry.shard}: {entry.name}"
    assert caught.value.found == "scale byte 255 (not a number) in row 0, block 0"
    assert not (tmp_path / "artefact").exists()


# --- disks and checkpoints that change --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOSPC, "a disk with room"), (errno.EDQUOT, "quota"), (errno.EROFS, "may be written to")],
)
def test_a_disk_that_refuses_in_the_middle(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: str
) -> None:
    out = tmp_path / "artefact"

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(out / "stages" / "block_03.data"))

    monkeypatch.setattr(StageExporter, "write", refuse)
    with pytest.raises(ArtifactError) as caught:
        export(tiny_checkpoint, out)
    assert caught.value.where.endswith("block_03.data")
    assert expected in caught.value.expected
    assert "run the same command again" in caught.value.remedy
    assert not out.exists()


def test_a_target_that_cannot_be_made(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.mkdir

    def read_only(path: object, *arguments: object, **options: object) -> None:
        if ".export" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(work_folder.os, "mkdir", read_only)
    with pytest.raises(ArtifactError, match=r"Read-only file system; expected a disk that may be written to"):
        export(tiny_checkpoint, tmp_path / "artefact")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [rewrite, Path.unlink, lambda path: os.truncate(path, 5000)])
def test_a_checkpoint_that_changes_while_it_is_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """After the data file is written, before the stage is recorded."""
    real = StageExporter.write
    shard = Checkpoint.open(checkpoint).entry(f"layers.{LAYER}.attn.wq_a.weight").shard

    def write_and_change(self: StageExporter, *arguments: object, **options: object) -> object:
        files = real(self, *arguments, **options)  # type: ignore[arg-type]
        change(shard)
        return files

    monkeypatch.setattr(stage_pool.StageExporter, "write", write_and_change)
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, tmp_path / "artefact")
    assert shard.name in caught.value.where
    assert not (tmp_path / "artefact").exists()


def test_another_state_of_a_shard_means_another_stage(checkpoint: Path, tmp_path: Path) -> None:
    """Only stages and experts of the shard that was written to are made again."""
    out, seen = tmp_path / "artefact", {}
    export(checkpoint, out, layers=(LAYER, LAYER + 2))
    rewrite(Checkpoint.open(checkpoint).entry(f"layers.{LAYER}.attn.wq_a.weight").shard)
    progress = Progress(stage=lambda name, reused: seen.update({name: reused}))
    export(checkpoint, out, layers=(LAYER, LAYER + 2), progress=progress)
    assert seen == {f"block_{LAYER:02d}": False, f"block_{LAYER + 2:02d}": True}


# --- verification -----------------------------------------------------------------------------------------


def flip(path: Path, offset: int = 100) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_levels_of_verification(copied: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(copied, tmp_path / "artefact"))
    flip(artifact / "residents" / f"layers.{LAYER}.experts_w1.bin")
    Artifact.open(artifact, verify="none")
    for level in ("headers", "full"):
        with pytest.raises(ArtifactError, match=r"experts_w1\.bin: found SHA-256"):
            Artifact.open(artifact, verify=level)


@pytest.mark.parametrize(
    "damaged",
    [f"residents/layers.{LAYER}.experts_w1.bin", f"stages/block_{LAYER:02d}.data", f"stages/block_{LAYER:02d}.onnx"],
)
def test_exporting_again_mends_a_damaged_artefact(
    copied: Path, tiny_checkpoint: Path, tmp_path: Path, damaged: str
) -> None:
    """Files of the old artefact are taken over only if they are what it says they are."""
    out = Path(shutil.copytree(copied, tmp_path / "artefact"))
    flip(out / damaged)
    with pytest.raises(ArtifactError, match="Export the checkpoint again"):
        Artifact.open(out)
    export(tiny_checkpoint, out, copy_experts=True)
    Artifact.open(out, verify="full")
    assert (out / damaged).read_bytes() == (copied / damaged).read_bytes()


def test_full_verification_reads_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "artefact"
    export(checkpoint, out)
    entry = Checkpoint.open(checkpoint).entry(f"layers.{LAYER}.ffn.experts.1.w2.weight")
    flip(entry.shard, entry.offset)
    Artifact.open(out, verify="headers")
    with pytest.raises(CheckpointError, match=r"experts_w2: found SHA-256"):
        Artifact.open(out, verify="full")


def test_a_graph_that_points_elsewhere_is_not_opened(copied: Path, tmp_path: Path) -> None:
    """Digests that fit do not help: the manifest may be hostile as a whole."""
    import onnx

    artifact = Path(shutil.copytree(copied, tmp_path / "artefact"))
    path = artifact / "stages" / f"block_{LAYER:02d}.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    next(item for item in tensor.external_data if item.key == "location").value = "/etc/passwd"
    path.write_bytes(model.SerializeToString())
    document = json.loads((artifact / "manifest.json").read_text())
    content = path.read_bytes()
    document["stages"][0]["onnx"] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    del document["digest"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (artifact / "manifest.json").write_text(json.dumps(document))
    for level in ("none", "headers"):
        with pytest.raises(ArtifactError, match=r"/etc/passwd.*expected weights inside block_03\.data"):
            Artifact.open(artifact, verify=level)
