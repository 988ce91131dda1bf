"""The compiled loop and numpy's passes give equal bits, and a missing or broken numba changes no result."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.runtime.engram import compiled
from engram_trt.runtime.engram import store as engram_store
from engram_trt.runtime.engram.dequantize import Dequantizer, products
from engram_trt.runtime.engram.host import HostTable
from engram_trt.runtime.engram.packed import PackedHeader, PackedTable, checksums_digest, pack_records
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import Ids, Located, MappedTable, ShardFiles, Table, TableShape

Rows = npt.NDArray[np.uint8]
NUM_ROWS = 3000


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The loop as a new process finds it, before and after."""
    compiled._load.cache_clear()
    yield
    compiled._load.cache_clear()


def loop() -> compiled.Convert:
    found = compiled.compiled_convert(compiled.COMPILE_ROWS)
    assert found is not None  # the test tools bring numba
    return found


def located(rows: Rows, scales: Rows, ids: Ids) -> Located:
    """Rows of two arrays, where they are."""
    flat = []
    for values in (rows, scales):
        flat.append(values.reshape(-1))
        flat[-1].flags.writeable = False
    return Located(rows=flat[0], row_starts=ids * rows.shape[1], scales=flat[1], scale_starts=ids * scales.shape[1])


def by_numpy(rows: Rows, scales: Rows) -> npt.NDArray[np.uint16]:
    out = np.empty(rows.shape, dtype=np.uint16)
    Dequantizer(rows.shape[1]).convert(rows, scales, out)
    return out


def every_pair() -> tuple[Rows, Rows]:
    """All codes under all scales that are numbers: [255, 256] and [255, 8]."""
    return np.tile(np.arange(256, dtype=np.uint8), (255, 1)), np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, 1)


def test_every_code_under_every_scale_has_the_bits_of_numpy() -> None:
    rows, scales = every_pair()
    for codes in (rows, np.where(rows & 0x7F == 0x7F, 0, rows).astype(np.uint8)):  # with and without NaN codes
        out = np.empty(codes.shape, dtype=np.uint16)
        assert loop()(located(codes, scales, np.arange(255)), out) == -1
        assert np.array_equal(out, by_numpy(codes, scales))


def test_plain_python_gives_the_bits_of_numpy_too() -> None:
    """The source of the loop, without a compiler between: a wrong result is the source's, not numba's."""
    rows, scales = every_pair()
    places = located(rows, scales, np.arange(255))
    out = np.empty(rows.shape, dtype=np.uint16)
    found, _ = compiled.convert_rows(
        places.rows, places.row_starts, places.scales, places.scale_starts, products(), out
    )
    assert found == -1
    assert np.array_equal(out, by_numpy(rows, scales))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 7, 8, 9, 24]), st.integers(1, 150), st.integers(0, 255))
def test_random_rows_of_any_width_have_the_bits_of_numpy(seed: int, groups: int, count: int, extreme: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (200, groups * 32), dtype=np.uint8)
    rows[: 100 + extreme % 100] &= 0xBF  # many rows without codes that are not numbers
    scales = random.integers(90, 140, (200, groups), dtype=np.uint8)
    scales[random.integers(0, 200, 20), random.integers(0, groups, 20)] = min(extreme, 254)
    ids = random.integers(0, 200, count)
    out = np.empty((count, groups * 32), dtype=np.uint16)
    assert loop()(located(rows, scales, ids), out) == -1
    assert np.array_equal(out, by_numpy(rows[ids], scales[ids]))


def test_the_first_scale_that_is_no_number_is_named() -> None:
    rows, scales = np.full((90, 256), 8, dtype=np.uint8), np.full((90, 8), 120, dtype=np.uint8)
    scales[70, 5], scales[80, 1] = 255, 255
    out = np.empty((90, 256), dtype=np.uint16)
    assert loop()(located(rows, scales, np.arange(90)), out) == 70 * 8 + 5
    assert loop()(located(rows, scales, np.arange(90)[::-1].copy()), out) == 9 * 8 + 1


# --- through the store ------------------------------------------------------------------------------------------


def tables_of(folder: Path, rows: Rows, scales: Rows) -> dict[str, Table]:
    """One content in every place that can be read in place."""
    shape = TableShape(layer_id=1, num_rows=len(rows), row_bytes=rows.shape[1], scale_bytes=scales.shape[1])
    path, packed = folder / "shard", folder / "packed"
    path.write_bytes(bytes(13) + rows.tobytes() + scales.tobytes())
    entries, offset = [], 13
    for name, values in (("rows", rows), ("scales", scales)):
        entries.append(
            TensorEntry(name=name, shard=path, dtype="", shape=values.shape, offset=offset, nbytes=values.nbytes)
        )
        offset += values.nbytes
    header = PackedHeader(
        layer_id=1, num_rows=len(rows), row_bytes=shape.row_bytes, scale_bytes=shape.scale_bytes, source_digest=""
    )
    checksums = np.zeros(header.num_blocks, dtype=np.uint32)
    final = replace(header, checksums_sha256=checksums_digest(checksums))
    content = final.to_page() + checksums.tobytes().ljust(header.data_offset - 4096, b"\0")
    packed.write_bytes(content + pack_records(header, rows, scales).tobytes())
    memory = np.frombuffer(rows.tobytes() + scales.tobytes(), dtype=np.uint8)
    return {
        "mmap": MappedTable(shape, entries[0], entries[1], ShardFiles({path: path.stat().st_size})),
        "packed": PackedTable(packed, shape),
        "host": HostTable(shape, memory, is_shared=False),
    }


@pytest.fixture(scope="module")
def content() -> tuple[Rows, Rows]:
    random = np.random.default_rng(9)
    rows = random.integers(0, 256, (NUM_ROWS, 256), dtype=np.uint8)
    rows[: NUM_ROWS // 2] &= 0xBF
    scales = random.integers(100, 130, (NUM_ROWS, 8), dtype=np.uint8)
    scales[7], scales[11] = 2, 250
    return rows, scales


@pytest.mark.parametrize("name", ["mmap", "packed", "host"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_store_gives_equal_bits_with_and_without_numba(
    name: str, num_threads: int, content: tuple[Rows, Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EngramStore({1: tables_of(tmp_path, *content)[name]}, num_threads=num_threads)
    random = np.random.default_rng(3)
    batch = np.concatenate([random.integers(0, NUM_ROWS, 5000), [0, 0, NUM_ROWS - 1]])
    expected = by_numpy(content[0][batch], content[1][batch])
    copied: list[int] = []
    copy = store.tables[1].copy
    monkeypatch.setattr(store.tables[1], "copy", lambda ids, *out: (copied.append(ids.size), copy(ids, *out)))
    loop()
    assert np.array_equal(store.rows_bfloat16(1, batch), expected)
    assert np.array_equal(store.rows_bfloat16(1, batch[::-1]), expected[::-1])
    assert copied == []  # the loop did it
    strided = np.empty((batch.size, 2, 256), dtype=np.uint16)[:, 1]
    assert np.array_equal(store.rows_bfloat16(1, batch, strided), expected)
    assert sum(copied) == batch.size
    monkeypatch.setattr(engram_store, "compiled_convert", lambda num_rows: None)
    assert np.array_equal(store.rows_bfloat16(1, batch), expected)
    assert sum(copied) == 2 * batch.size
    store.close()


@pytest.mark.parametrize("name", ["mmap", "packed", "host"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_scale_that_is_no_number_is_one_error_either_way(
    name: str, is_compiled: bool, content: tuple[Rows, Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, scales = content[0], content[1].copy()
    scales[2345, 6] = 255
    store = EngramStore({1: tables_of(tmp_path, rows, scales)[name]})
    if not is_compiled:
        monkeypatch.setattr(engram_store, "compiled_convert", lambda num_rows: None)
    with pytest.raises(CheckpointError, match=r"layer 1: found scale byte 255 .* in row 2345, block 6"):
        store.rows_bfloat16(1, np.concatenate([np.arange(2300), np.arange(2300)[::-1], [1, 2345, 3]]))
    store.close()


def test_pages_are_populated_before_the_loop_reads_them(content: tuple[Rows, Rows], tmp_path: Path) -> None:
    """The shard is cut behind the check of its size: an error of the request, not a signal to the process."""
    table = tables_of(tmp_path, *content)["mmap"]
    store = EngramStore({1: table})
    table.check = lambda: None  # type: ignore[method-assign]
    loop()
    store.rows_bfloat16(1, np.arange(900))
    os.truncate(tmp_path / "shard", 256 * 2000)
    with pytest.raises(CheckpointError, match=r"shard: (rows|scales), row \d+: found bytes that cannot be read"):
        store.rows_bfloat16(1, np.arange(900))
    store.close()


@pytest.mark.parametrize("shape", [(3, 256), (2, 128), (1, 256)])
def test_an_output_of_another_shape_is_refused(
    shape: tuple[int, int], content: tuple[Rows, Rows], tmp_path: Path
) -> None:
    store = EngramStore({1: tables_of(tmp_path, *content)["host"]})
    with pytest.raises(ValueError, match=r"not uint16 \(2, 256\)"):
        store.rows_bfloat16(1, np.array([1, 2]), np.empty(shape, dtype=np.uint16))
    with pytest.raises(ValueError, match="out is float32"):
        store.rows_bfloat16(1, np.array([1, 2]), np.empty((2, 256), dtype=np.float32))  # type: ignore[arg-type]
    store.close()


# --- loading it -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forgotten")
def test_only_a_large_call_loads_the_loop() -> None:
    assert compiled.compiled_convert(compiled.COMPILE_ROWS - 1) is None
    assert loop() is compiled.compiled_convert(1)


@pytest.mark.usefixtures("forgotten")
def test_without_numba_there_is_no_loop_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert compiled.compiled_convert(1 << 20) is None
    assert not recwarn.list


@pytest.mark.usefixtures("forgotten")
def test_a_numba_that_cannot_be_imported_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "numba":
            raise ImportError("Numba needs NumPy 1.0 or less")
        return real(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        with pytest.warns(RuntimeWarning, match="needs NumPy 1.0 or less.*dequantised by numpy"):
            assert compiled.compiled_convert(1 << 20) is None
        assert compiled.compiled_convert(1 << 20) is None


@pytest.mark.usefixtures("forgotten")
def test_threads_that_come_at_once_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compile_ = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda: (calls.append(1), compile_())[1])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(loop())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert len(found) == 4
    assert calls == [1]


_PROCESS = """
import json, sys
import numpy as np
from engram_trt.runtime.engram import compiled
from engram_trt.runtime.engram.tables import Located
assert "numba" not in sys.modules
loop = compiled.compiled_convert(1 << 20)
rows, scales = np.full(64, 0x38, np.uint8), np.full(2, 127, np.uint8)  # ones
rows.flags.writeable = scales.flags.writeable = False
out = np.empty((2, 32), np.uint16)
starts = np.arange(2)
fault = loop(Located(rows=rows, row_starts=starts * 32, scales=scales, scale_starts=starts), out)
print(json.dumps([fault, sorted(set(out.reshape(-1).tolist()))]))
"""


def start(cache: Path, **others: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | others
    return subprocess.Popen([sys.executable, "-c", _PROCESS], stdout=subprocess.PIPE, text=True, env=environment)


def require_ones(process: subprocess.Popen[str]) -> None:
    answer = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    assert json.loads(answer) == [-1, [0x3F80]]


def test_processes_that_start_at_once_share_a_cache_and_survive_a_damaged_one(tmp_path: Path) -> None:
    for process in [start(tmp_path) for _ in range(2)]:
        require_ones(process)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert sorted(path.suffix for path in files) == [".nbc", ".nbi"]
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        require_ones(start(tmp_path))
        path.write_bytes(content)


def test_no_place_for_a_cache_costs_only_time(tmp_path: Path) -> None:
    """numba looks in no place that exists: what it finds where neither its folder nor the user's can be written to."""
    require_ones(start(tmp_path, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator"))
    assert not list(tmp_path.iterdir())
