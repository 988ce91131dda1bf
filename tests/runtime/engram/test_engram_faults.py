"""Shards that are cut, replaced, unreadable or huge; memory that is too small; kernels without the newest call."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import CheckpointError, DeploymentError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.export.synth import SynthRequest, synthesize
from engram_trt.runtime.engram import files as engram_files
from engram_trt.runtime.engram import host as engram_host
from engram_trt.runtime.engram import memory as engram_memory
from engram_trt.runtime.engram.host import load_host_table, shard_parts
from engram_trt.runtime.engram.opening import open_store
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import MappedTable, ShardFiles, TableShape, table_entries, table_names
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

CONFIG = Path(__file__).parents[2] / "data" / "configs" / "zero4.json"
BACKEND = OnnxRuntimeBackend({}, lambda spec, binding: np.zeros(0, dtype=np.int8))
MMAP = EngramPlacement(residency="mmap", cache_mib=0)
WIDTH, GROUPS = 256, 8


def sparse_table(path: Path, num_rows: int) -> tuple[TableShape, TensorEntry, TensorEntry]:
    """A shard of holes with one big table in it; a hole reads as zero."""
    start = 64  # not a multiple of a page, as in a real shard
    rows_bytes, scales_bytes = num_rows * WIDTH, num_rows * GROUPS
    with path.open("wb") as file:
        file.truncate(start + rows_bytes + scales_bytes)
    rows = TensorEntry(
        name="rows", shard=path, dtype="F8_E4M3", shape=(num_rows, WIDTH), offset=start, nbytes=rows_bytes
    )
    scales = TensorEntry(
        name="scales",
        shard=path,
        dtype="F8_E8M0",
        shape=(num_rows, GROUPS),
        offset=start + rows_bytes,
        nbytes=scales_bytes,
    )
    return TableShape(layer_id=1, num_rows=num_rows, row_bytes=WIDTH, scale_bytes=GROUPS), rows, scales


def write_row(rows: TensorEntry, scales: TensorEntry, row: int) -> tuple[bytes, bytes]:
    """Put a pattern of its own into a row; returns it."""
    random = np.random.default_rng(row)
    parts = tuple(random.integers(1, 120, size, dtype=np.uint8).tobytes() for size in (WIDTH, GROUPS))
    with rows.shard.open("r+b") as file:
        for entry, part in zip((rows, scales), parts, strict=True):
            file.seek(entry.offset + row * len(part))
            file.write(part)
    return parts[0], parts[1]


def store_over(path: Path, table: tuple[TableShape, TensorEntry, TensorEntry], **choices: Any) -> EngramStore:
    files = ShardFiles({path: path.stat().st_size})
    return EngramStore({1: MappedTable(*table, files)}, on_close=files.close, **choices)


def fetch(store: EngramStore, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    rows, scales = np.empty((ids.size, WIDTH), np.uint8), np.empty((ids.size, GROUPS), np.uint8)
    positions = store.fetch(1, ids, rows, scales).positions
    return rows[positions], scales[positions]


def test_a_table_of_101_gb_opens_at_once_and_is_addressed_with_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    num_rows = 384016682  # layer 14 of the released model, spec 2.2
    table = sparse_table(path, num_rows)
    at_limits = [2**31 // WIDTH - 1, 2**31 // WIDTH, 2**32 // WIDTH - 1, 2**32 // WIDTH, 2**31 // GROUPS]
    ids = np.array(sorted([0, *at_limits, num_rows - 1]))
    written = [write_row(*table[1:], int(row)) for row in ids]
    before = psutil.Process().memory_info().rss
    store = store_over(path, table)
    rows, scales = fetch(store, ids)
    assert psutil.Process().memory_info().rss - before < 200 << 20
    for row, (features, scale) in enumerate(written):
        assert rows[row].tobytes() == features
        assert scales[row].tobytes() == scale
    # More than one system call's worth of cold pages, all of them holes but one.
    spread = np.unique(np.concatenate([np.linspace(10, num_rows - 10, 3000, dtype=np.int64), ids[-1:]]))
    rows, _ = fetch(store, spread)
    assert not rows[:-1].any()
    assert rows[-1].tobytes() == written[-1][0]
    store.close()


def test_random_rows_are_read_without_those_behind_them(tmp_path: Path) -> None:
    """The kernel says of every mapping whether it reads ahead: `rr` is random read."""
    path = tmp_path / "shard.safetensors"
    store = store_over(path, sparse_table(path, 5000))
    (mapping,) = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
    (flags,) = [line for line in mapping.splitlines() if line.startswith("VmFlags")][:1]
    assert "rr" in flags.split()
    store.close()


def test_a_page_that_neighbours_share_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.safetensors"
    table = sparse_table(path, 20000)
    written = write_row(*table[1:], 9000)
    store = store_over(path, table)
    asked: list[int] = []
    populate = engram_files._Advice.populate

    def watch(self: Any, ranges: Any) -> None:
        asked.append(len(ranges))
        populate(self, ranges)

    monkeypatch.setattr(engram_files._Advice, "populate", watch)
    rows = np.empty((10000, WIDTH), np.uint8), np.empty((10000, GROUPS), np.uint8)
    store.tables[1].gather(np.arange(10000), *rows)
    spans = set()
    for entry in table[1:]:
        width = entry.shape[1]
        for row in range(10000):
            start = entry.offset + row * width
            spans.add((entry.name, start // 4096, (start + width - 1) // 4096))
    assert asked == [len(spans)]
    assert rows[0][9000].tobytes() == written[0]
    store.tables[1].gather(np.arange(10000), *rows)
    assert asked == [len(spans)]  # all are known
    store.close()


def by_reading(self: Any, index: int, address: int, length: int) -> None:
    """What a kernel without MADV_POPULATE_READ leads to."""
    self._read_pages(index, address - self._address, length)


@pytest.fixture
def populate_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend to be an older kernel."""

    def choose(way: str) -> None:
        if way == "process_madvise":
            return
        monkeypatch.setattr(engram_files, "_process_descriptor", lambda pid: None)
        if way == "pread":
            monkeypatch.setattr(engram_files._Advice, "_one", by_reading)

    return choose


@pytest.mark.parametrize("way", ["process_madvise", "madvise", "pread"])
@pytest.mark.parametrize("count", [3, 2500])
def test_a_page_that_is_gone_is_an_error_with_file_and_row(
    way: str, count: int, tmp_path: Path, populate_ways: Callable[[str], None]
) -> None:
    """The check of the file is skipped, as if the file were cut right after it: still no signal."""
    populate_ways(way)
    path = tmp_path / "shard.safetensors"
    table = sparse_table(path, 20000)
    written = write_row(*table[1:], 40)
    store = store_over(path, table)
    store.tables[1].check = lambda: None  # type: ignore[method-assign]
    good = np.arange(0, 3 * count, 3)
    assert fetch(store, np.append(good, 40))[0][-1].tobytes() == written[0]
    os.truncate(path, table[1].offset + 15000 * WIDTH)
    first_gone = -(-(15000 * WIDTH + table[1].offset) // 4096) * 4096  # what is left of the last page reads as zeros
    gone_row = (first_gone - table[1].offset) // WIDTH + 1
    with pytest.raises(CheckpointError, match=rf"shard.safetensors: rows, row {gone_row}: found bytes that cannot"):
        fetch(store, np.concatenate([good, np.arange(gone_row, gone_row + 30)]))
    store.close()


def test_an_error_of_the_disk_is_an_error_with_file_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.safetensors"
    store = store_over(path, sparse_table(path, 5000))
    monkeypatch.setattr(engram_files, "_process_descriptor", lambda pid: None)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = store.tables[1]._rows.file  # type: ignore[attr-defined]
    file._advice = engram_files._Advice(-1, file._address)
    monkeypatch.setattr(engram_files._Advice, "_one", by_reading)
    monkeypatch.setattr(engram_files._Advice, "start_reading", lambda *_: None)
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(CheckpointError, match=r"shard.safetensors: rows, row 17: .*Input/output error"):
        fetch(store, np.array([17, 4000]))


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "zero4"
    synthesize(SynthRequest(config=ModelConfig.from_file(CONFIG), out=folder, seed=5))
    return folder


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def _replace(path: Path) -> None:
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def _write(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (_cut, "expected .* as when it was opened"),
    (_replace, "found another file"),
    (_write, "found a file that was written to"),
    (lambda path: path.unlink(), "No such file"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_shard_that_changes_while_running_fails_the_request(
    change: Callable[[Path], None], message: str, checkpoint_folder: Path
) -> None:
    checkpoint = Checkpoint.open(checkpoint_folder)
    layer_id = checkpoint.config.engram_layer_ids[0]
    store = open_store(checkpoint, MMAP, BACKEND, binds_host=False)
    shard = checkpoint.entry(table_names(layer_id)[0]).shard
    change(shard)
    rows, scales = np.empty((2, 32), np.uint8), np.empty((2, 1), np.uint8)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.fetch(layer_id, np.array([1, 2]), rows, scales)
    assert shard.name in str(caught.value)
    store.close()


def test_a_scale_that_is_no_number_is_named_by_row_and_block(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    table = sparse_table(path, 5000)
    with path.open("r+b") as file:
        file.seek(table[2].offset + 4321 * GROUPS + 6)
        file.write(b"\xff")
    store = store_over(path, table)
    fetch(store, np.array([1, 4320]))
    with pytest.raises(CheckpointError, match=r"scale byte 255 .* in row 4321, block 6"):
        fetch(store, np.array([7, 4321, 4322]))
    with pytest.raises(CheckpointError, match=r"scale byte 255 .* in row 4321, block 6"):
        load_host_table(table[0], lambda *out: shard_parts(table[1:], *out), identity="x", num_threads=2, share=False)
    store.close()


def test_other_rows_or_dtypes_than_the_primes_ask_for_are_refused(checkpoint_folder: Path) -> None:
    checkpoint = Checkpoint.open(checkpoint_folder)
    layer_id = checkpoint.config.engram_layer_ids[0]
    rows, scales = table_names(layer_id)
    for name, change in ((rows, {"shape": (383, 32)}), (scales, {"dtype": "U8"}), (scales, {"shape": (384, 2)})):
        entry = checkpoint.entry(name)
        fields = {key: getattr(entry, key) for key in ("name", "shard", "dtype", "shape", "offset", "nbytes")}
        wrong = TensorEntry(**{**fields, **change})
        entries = {**checkpoint._entries, name: wrong}
        other = Checkpoint(
            root=checkpoint.root,
            config=checkpoint.config,
            partial_layers=None,
            header_digest="",
            _entries=entries,
            _shards=checkpoint._shards,
        )
        with pytest.raises(CheckpointError, match="the rows are the sum of the layer's primes") as caught:
            table_entries(other, layer_id)
        assert name in str(caught.value)


# --- host memory ----------------------------------------------------------------------------------------------


def test_too_little_memory_is_said_with_numbers_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, *_ = sparse_table(tmp_path / "shard", 384016682)

    def never(*_: Any) -> Any:
        raise AssertionError("something was read")

    for share in (False, True):
        monkeypatch.setattr(engram_host, "available_memory", lambda: 50_000_000_000)
        with pytest.raises(DeploymentError, match=r"found (50,000,000,000|[\d,]+) bytes of memory available") as caught:
            load_host_table(shape, never, identity=str(tmp_path), num_threads=1, share=share)
        assert "101,380,404,048 for the table" in str(caught.value)  # spec 7: bytes of the table of layer 14


def test_parts_fill_side_by_side_and_tell_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, *entries = sparse_table(tmp_path / "shard", 5000)
    features, _ = write_row(*entries, 4999)
    monkeypatch.setattr(engram_host, "_PART_BYTES", 100_000)
    told: list[int] = []

    @contextmanager
    def bar(label: str, num_bytes: int, smallest: int = 0) -> Iterator[Callable[[int], None]]:
        assert (label, num_bytes) == ("Engram table of layer 1", 5000 * (WIDTH + GROUPS))
        yield told.append

    monkeypatch.setattr(engram_host, "byte_bar", bar)
    together = threading.Barrier(2)

    def parts(*out: Any) -> Any:
        found = shard_parts(tuple(entries), *out)
        assert len(found) == 14  # 13 of features, 1 of scales

        def meet(part: Callable[[], int]) -> int:
            together.wait(timeout=60)  # broken if parts come one by one
            return part()

        return [partial(meet, part) for part in found]

    table = load_host_table(shape, parts, identity="x", num_threads=2, share=False)
    assert sum(told) == shape.num_bytes
    assert table.rows[4999].tobytes() == features
    table.close()


def test_the_memory_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"memory.max": 3 << 30, "memory.current": 1 << 30}
    monkeypatch.setattr(engram_memory, "_number", lambda path: values[path.name])
    monkeypatch.setattr(engram_memory, "_meminfo", lambda key: 64 << 30)
    assert engram_memory.available_memory() == 2 << 30


def test_a_short_read_while_filling_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    table = sparse_table(path, 5000)
    os.truncate(path, table[2].offset + 4000 * GROUPS)
    with pytest.raises(CheckpointError, match=r"scales, row 4000: .*the file ends there"):
        load_host_table(table[0], lambda *out: shard_parts(table[1:], *out), identity="x", num_threads=2, share=False)


_SHARING = """
import json, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {tests!r})
import test_engram_faults as faults
from engram_trt.runtime.engram import host as engram_host
engram_host.SHARED_FOLDER = Path({shared!r})
path = Path({shard!r})
shape, rows, scales = faults.described(path)
filled = []
def parts(*out):
    found = engram_host.shard_parts((rows, scales), *out)
    filled.append(len(found))
    return found
table = engram_host.load_host_table(shape, parts, identity="same", num_threads=1, share=True)
print(json.dumps({{"filled": len(filled), "sum": int(table.rows.sum())}}), flush=True)
sys.stdin.readline()
table.close()
"""


def described(path: Path) -> tuple[TableShape, TensorEntry, TensorEntry]:
    """The entries of a table that `sparse_table` wrote before, with 5,000 rows."""
    size = path.stat().st_size
    shape, rows, scales = sparse_table(path.with_name(f"{path.name}-{os.getpid()}"), 5000)
    rows.shard.unlink()
    assert size == scales.offset + scales.nbytes
    return (
        shape,
        TensorEntry(**{**{k: getattr(rows, k) for k in rows.__slots__}, "shard": path}),
        TensorEntry(**{**{k: getattr(scales, k) for k in scales.__slots__}, "shard": path}),
    )


def test_processes_share_one_copy_and_the_last_one_removes_it(tmp_path: Path) -> None:
    shared, shard = tmp_path / "shm", tmp_path / "shard"
    shared.mkdir()
    table = sparse_table(shard, 5000)
    total = sum(write_row(*table[1:], 77)[0])
    code = _SHARING.format(tests=str(Path(__file__).parent), shared=str(shared), shard=str(shard))
    start = [sys.executable, "-c", code]
    processes = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    assert [answer["sum"] for answer in answers] == [total] * 3
    assert sum(answer["filled"] for answer in answers) == 1
    (file,) = shared.iterdir()
    for process in processes[:2]:
        process.communicate("\n", timeout=30)
    assert file.exists()
    processes[2].communicate("\n", timeout=30)
    assert not file.exists()
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_what_a_killed_process_left_is_filled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram_host, "SHARED_FOLDER", tmp_path)
    table = sparse_table(tmp_path / "shard", 5000)
    features, _ = write_row(*table[1:], 3)

    def parts(*out: Any) -> Any:
        return shard_parts(table[1:], *out)

    first = load_host_table(table[0], parts, identity="same", num_threads=1, share=True)
    (file,) = tmp_path.glob("engram-trt-*")
    content = bytearray(file.read_bytes())
    first.close()
    assert not file.exists()
    content[3 * WIDTH : 4 * WIDTH] = bytes(WIDTH)
    content[-8:] = bytes(8)  # all pages there, the mark of completeness not
    file.write_bytes(content)
    second = load_host_table(table[0], parts, identity="same", num_threads=1, share=True)
    assert second.rows[3].tobytes() == features
    assert sum((second.facts()["numa_pages"] or {"": 1}).values()) > 0
    second.close()


def test_a_failed_fill_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram_host, "SHARED_FOLDER", tmp_path)
    table = sparse_table(tmp_path / "shard", 5000)
    os.truncate(tmp_path / "shard", 1000)
    with pytest.raises(CheckpointError, match="the file ends there"):
        load_host_table(table[0], lambda *out: shard_parts(table[1:], *out), identity="same", num_threads=1, share=True)
    assert not list(tmp_path.glob("engram-trt-*"))


def test_shared_memory_without_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram_host, "SHARED_FOLDER", tmp_path / "absent")
    table = sparse_table(tmp_path / "shard", 5000)
    with pytest.raises(DeploymentError, match=r"shared memory that cannot be had .*engram.share_host = false"):
        load_host_table(table[0], lambda *_: [], identity="same", num_threads=1, share=True)
