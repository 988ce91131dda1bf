"""Packed tables: any kill, full disk or second process leaves the old file or none, and the next run goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import CheckpointError, DeploymentError, RequestError
from engram_trt.configs.model import ModelConfig
from engram_trt.export.synth import SynthRequest, synthesize
from engram_trt.runtime.engram import packed as engram_packed
from engram_trt.runtime.engram import packing as engram_packing
from engram_trt.runtime.engram.opening import open_store
from engram_trt.runtime.engram.pack_command import COMMAND
from engram_trt.runtime.engram.packed import PackedHeader, pack_records, packed_path
from engram_trt.runtime.engram.packing import pack_table, verify_packed
from engram_trt.runtime.engram.tables import table_names
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

CONFIG = Path(__file__).parents[2] / "data" / "configs" / "zero4.json"
BACKEND = OnnxRuntimeBackend({}, lambda spec, binding: np.zeros(0, dtype=np.int8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packing") / "zero4"
    synthesize(SynthRequest(config=ModelConfig.from_file(CONFIG), out=path, seed=5))
    return path


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def layer_id(checkpoint: Checkpoint) -> int:
    return checkpoint.config.engram_layer_ids[0]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks in a table of 384 rows, and a point to go on from after each."""
    monkeypatch.setattr(engram_packed, "BLOCK_PAGES", 1)
    monkeypatch.setattr(engram_packing, "SYNC_BLOCKS", 1)


def content_by_hand(checkpoint: Checkpoint, layer_id: int) -> list[bytes]:
    """The records of a table, from the two tensors, by nothing of the code under test."""
    parts = []
    for name in table_names(layer_id):
        entry = checkpoint.entry(name)
        data = entry.shard.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        parts.append([data[row * entry.shape[1] : (row + 1) * entry.shape[1]] for row in range(entry.shape[0])])
    return [features + scales for features, scales in zip(*parts, strict=True)]


def require_right(path: Path, checkpoint: Checkpoint, layer_id: int) -> None:
    """Every record stands where the format says."""
    verify_packed(path)
    records, data = content_by_hand(checkpoint, layer_id), path.read_bytes()
    per_page, size = 4096 // len(records[0]), len(records[0])
    start = len(data) - -(-len(records) // per_page) * 4096
    for row, record in enumerate(records):
        place = start + row // per_page * 4096 + row % per_page * size
        assert data[place : place + size] == record
        assert place // 4096 == (place + size - 1) // 4096


def test_a_record_never_crosses_a_page(checkpoint: Checkpoint, layer_id: int, tmp_path: Path) -> None:
    seen: list[int] = []
    path = pack_table(checkpoint, layer_id, tmp_path, seen.append)
    require_right(path, checkpoint, layer_id)
    assert sum(seen) == 384 * 33
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_released_layout_holds_fifteen_rows_a_page() -> None:
    header = PackedHeader(layer_id=14, num_rows=384016682, row_bytes=256, scale_bytes=8, source_digest="")
    assert header.rows_per_page == 15
    assert header.file_bytes == header.data_offset + 25601113 * 4096
    pages = pack_records(header, np.full((31, 256), 7, np.uint8), np.full((31, 8), 9, np.uint8))
    assert pages.shape == (3, 4096)
    assert pages[2, :264].tolist() == [7] * 256 + [9] * 8
    assert not pages[2, 264:].any()
    assert not pages[0, 15 * 264 :].any()


def _steps(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> list[str]:
    """Run `act` instead of the at-th call that changes the disk; returns the calls so far."""
    calls: list[str] = []

    def wrap(name: str) -> Any:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                act()
            return original(*arguments, **options)

        return call

    names = ("pwrite", "ftruncate", "fdatasync", "fsync", "rename", "open")
    fake = SimpleNamespace(**{**vars(os), **{name: wrap(name) for name in names}})
    monkeypatch.setattr(engram_packing, "os", fake)
    return calls


@pytest.mark.usefixtures("small_blocks")
def test_a_kill_at_any_step_leaves_the_file_or_none_and_the_next_run_goes_on(
    checkpoint: Checkpoint, layer_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        num_steps = len(_count_steps(patch, checkpoint, layer_id, tmp_path / "whole"))
    assert num_steps > 20
    for at in range(1, num_steps + 1):
        out = tmp_path / str(at)
        child = os.fork()
        if child == 0:  # dies at once, without cleaning up, as by SIGKILL
            try:
                _steps(monkeypatch, at, lambda: os._exit(9))
                pack_table(checkpoint, layer_id, out)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
        target = packed_path(out, layer_id)
        if target.exists():
            require_right(target, checkpoint, layer_id)
        require_right(pack_table(checkpoint, layer_id, out), checkpoint, layer_id)
        assert [file.name for file in out.iterdir()] == [target.name]


def _count_steps(patch: pytest.MonkeyPatch, checkpoint: Checkpoint, layer_id: int, out: Path) -> list[str]:
    calls = _steps(patch, 0, lambda: None)
    pack_table(checkpoint, layer_id, out)
    return calls


@pytest.mark.usefixtures("small_blocks")
def test_a_resumed_run_writes_only_what_is_missing(
    checkpoint: Checkpoint, layer_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = engram_packing._write

    def watch(descriptor: int, content: bytes, offset: int) -> None:
        if offset >= 2 * 4096:
            written.append((offset - 2 * 4096) // 4096)
            if written == [0, 1, 2]:
                raise KeyboardInterrupt
        write(descriptor, content, offset)

    monkeypatch.setattr(engram_packing, "_write", watch)
    with pytest.raises(KeyboardInterrupt):
        pack_table(checkpoint, layer_id, tmp_path)
    written.clear()
    written.append(-1)
    require_right(pack_table(checkpoint, layer_id, tmp_path), checkpoint, layer_id)
    assert written[1:] == [2, 3]


@pytest.mark.usefixtures("small_blocks")
def test_a_partial_file_of_other_weights_is_not_continued(
    checkpoint: Checkpoint, layer_id: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers of both checkpoints are the same, so only the bytes tell."""
    with monkeypatch.context() as patch:
        calls = _steps(patch, 16, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack_table(checkpoint, layer_id, tmp_path / "out")
        assert "fdatasync" in calls
    shutil.copytree(folder, tmp_path / "other")
    entry = checkpoint.entry(table_names(layer_id)[0])
    shard = tmp_path / "other" / entry.shard.name
    data = bytearray(shard.read_bytes())
    data[entry.offset : entry.offset + 40] = bytes(range(40))
    shard.write_bytes(data)
    other = Checkpoint.open(tmp_path / "other")
    assert other.header_digest == checkpoint.header_digest
    require_right(pack_table(other, layer_id, tmp_path / "out"), other, layer_id)


def test_a_full_disk_is_one_error_and_the_next_run_goes_on(
    checkpoint: Checkpoint, layer_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        _steps(patch, 5, full)
        with pytest.raises(DeploymentError, match="No space left on device"):
            pack_table(checkpoint, layer_id, tmp_path)
    assert not packed_path(tmp_path, layer_id).exists()
    require_right(pack_table(checkpoint, layer_id, tmp_path), checkpoint, layer_id)


def test_too_small_a_disk_is_said_before_the_first_byte(
    checkpoint: Checkpoint, layer_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    tiny = SimpleNamespace(f_bavail=2, f_frsize=4096)
    monkeypatch.setattr(engram_packing, "os", SimpleNamespace(**{**vars(os), "statvfs": lambda path: tiny}))
    assert real.f_bavail > 2
    with pytest.raises(DeploymentError, match=r"found 8,192 bytes free; expected 24,576"):
        pack_table(checkpoint, layer_id, tmp_path)


def test_a_source_that_ends_early_is_named_by_row(
    folder: Path, layer_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is cut after it was opened and checked, while the table is being packed."""
    shutil.copytree(folder, tmp_path / "cut")
    checkpoint = Checkpoint.open(tmp_path / "cut")
    entry = checkpoint.entry(table_names(layer_id)[1])

    def cut(*_: Any) -> None:
        os.truncate(entry.shard, entry.offset + 200)

    monkeypatch.setattr(engram_packing, "_require_room", cut)
    with pytest.raises(CheckpointError, match=rf"{entry.name}, row 200: .*the file ends there"):
        pack_table(checkpoint, layer_id, tmp_path / "out")
    assert not packed_path(tmp_path / "out", layer_id).exists()


_PACK = """
import sys
from pathlib import Path
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.runtime.engram import packing as engram_packing
from engram_trt.runtime.engram.packing import pack_table
done = []
print(pack_table(Checkpoint.open(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])), flush=True)
"""


def test_processes_that_pack_the_same_file_wait_for_each_other(
    checkpoint: Checkpoint, layer_id: int, folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _PACK, str(folder), str(layer_id), str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [str(packed_path(tmp_path / "out", layer_id))] * 3
    require_right(packed_path(tmp_path / "out", layer_id), checkpoint, layer_id)
    assert len(list((tmp_path / "out").iterdir())) == 1


# --- opening ---------------------------------------------------------------------------------------------------


def open_packed(checkpoint: Checkpoint, out: Path, **choices: Any) -> None:
    placement = EngramPlacement(residency="packed", packed_folder=str(out), cache_mib=0)
    open_store(checkpoint, placement, BACKEND, binds_host=False, **choices).close()


def test_a_packed_file_of_another_checkpoint_is_refused(
    checkpoint: Checkpoint, layer_id: int, folder: Path, tmp_path: Path
) -> None:
    pack_table(checkpoint, layer_id, tmp_path / "out")
    open_packed(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match="packed table of another checkpoint"):
        open_packed(checkpoint, tmp_path / "out", digests={table_names(layer_id)[1]: "0" * 64})
    synthesize(SynthRequest(config=ModelConfig.from_file(CONFIG), out=tmp_path / "seed6", seed=6))
    with pytest.raises(CheckpointError, match="packed table of another checkpoint"):
        open_packed(Checkpoint.open(tmp_path / "seed6"), tmp_path / "out")


@pytest.mark.parametrize("place", ["header", "checksums", "size", "absent", "unfinished"])
def test_a_damaged_packed_file_is_refused(place: str, checkpoint: Checkpoint, layer_id: int, tmp_path: Path) -> None:
    path = pack_table(checkpoint, layer_id, tmp_path)
    data = bytearray(path.read_bytes())
    if place == "header":
        data[30] ^= 1
    elif place == "checksums":
        data[4096] ^= 1
    elif place == "size":
        del data[-4096:]
    elif place == "unfinished":
        header = json.loads(data[:4092].rstrip(b"\0"))
        page = json.dumps({**header, "checksums_sha256": ""}).encode().ljust(4092, b"\0")
        data[:4096] = page + zlib.crc32(page).to_bytes(4, "little")
    path.write_bytes(data)
    if place == "absent":
        path.unlink()
    with pytest.raises(CheckpointError, match="pack-engram"):
        open_packed(checkpoint, tmp_path)


def test_damage_inside_the_data_is_found_where_all_is_read(
    checkpoint: Checkpoint, layer_id: int, tmp_path: Path
) -> None:
    path = pack_table(checkpoint, layer_id, tmp_path)
    data = bytearray(path.read_bytes())
    data[-4096 + 5] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rows 0..383: found a block with another checksum"):
        verify_packed(path)
    host = EngramPlacement(residency="host", packed_folder=str(tmp_path), share_host=False)
    with pytest.raises(CheckpointError, match="checksum"):
        open_store(checkpoint, host, BACKEND, binds_host=True)


# --- the command -----------------------------------------------------------------------------------------------


def run_command(**arguments: Any) -> int:
    return COMMAND.run(SimpleNamespace(**{"layers": None, "verify": False, "json": False, **arguments}))  # type: ignore[arg-type]


def test_the_command_packs_verifies_and_says_so(
    folder: Path, layer_id: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(checkpoint=folder, out=tmp_path, verify=True, json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"]
    assert [(fact["layer"], Path(fact["file"]).stat().st_size) for fact in facts["tables"]] == [(layer_id, 24576)]
    assert run_command(checkpoint=folder, out=tmp_path, layers=str(layer_id)) == 0
    assert "MiB" in capsys.readouterr().out
    with pytest.raises(RequestError, match="--layers: found '0'; expected Engram layers, out of 3"):
        run_command(checkpoint=folder, out=tmp_path, layers="0")
