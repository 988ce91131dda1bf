"""All residencies give the bytes that stand in the checkpoint; counters, cache, shards and dequantisation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import BackendError, DeploymentError, RequestError
from engram_trt.configs.model import ModelConfig
from engram_trt.export.synth import SynthRequest, synthesize
from engram_trt.runtime.engram import store as engram_store
from engram_trt.runtime.engram.cache import SCAN_SHARE, HotRows
from engram_trt.runtime.engram.dequantize import Dequantizer
from engram_trt.runtime.engram.opening import open_store
from engram_trt.runtime.engram.packing import pack_table
from engram_trt.runtime.engram.shards import ranges_by_columns, ranges_by_rows
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import TableShape, table_names
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

CONFIG = Path(__file__).parents[2] / "data" / "configs" / "zero4.json"
BACKEND = OnnxRuntimeBackend({}, lambda spec, binding: np.zeros(0, dtype=np.int8))
Values = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

PLACEMENTS: dict[str, dict[str, Any]] = {
    "mmap": {"residency": "mmap", "cache_mib": 0},
    "mmap with cache": {"residency": "mmap", "cache_mib": 1},
    "packed": {"residency": "packed", "cache_mib": 0},
    "host": {"residency": "host", "share_host": False},
    "host from packed": {"residency": "host", "share_host": False},
    "shared host": {"residency": "host"},
    "3 row shards": {"residency": "device", "num_shards": 3},
    "3 row shards from packed": {"residency": "device", "num_shards": 3},
    "5 column shards": {"residency": "device", "num_shards": 5, "shard_by": "columns"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("engram") / "zero4"
    synthesize(SynthRequest(config=ModelConfig.from_file(CONFIG), out=folder, seed=5))
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def layer_id(checkpoint: Checkpoint) -> int:
    return checkpoint.config.engram_layer_ids[0]


@pytest.fixture(scope="module")
def packed_folder(checkpoint: Checkpoint, layer_id: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    for layer in checkpoint.config.engram_layer_ids:
        pack_table(checkpoint, layer, folder)
    return folder


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint, layer_id: int) -> Values:
    """The tensors, read with plain file reads."""
    values = []
    for name in table_names(layer_id):
        entry = checkpoint.entry(name)
        content = entry.shard.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        values.append(np.frombuffer(content, dtype=np.uint8).reshape(entry.shape))
    return values[0], values[1]


@pytest.fixture(scope="module")
def stores(checkpoint: Checkpoint, packed_folder: Path) -> Iterator[dict[str, EngramStore]]:
    opened = {}
    for name, choices in PLACEMENTS.items():
        packed = {"packed_folder": str(packed_folder)} if "packed" in name else {}
        opened[name] = open_store(checkpoint, EngramPlacement(**choices, **packed), BACKEND, binds_host=False)
    yield opened
    for store in opened.values():
        store.close()


def fetch(store: EngramStore, layer_id: int, ids: npt.NDArray[np.int64]) -> tuple[Values, Any]:
    """Rows and scales per id, put together from what the store delivered."""
    shape = store.shape(layer_id)
    rows = np.full((ids.size, shape.row_bytes), 0xAA, dtype=np.uint8)
    scales = np.full((ids.size, shape.scale_bytes), 0xAA, dtype=np.uint8)
    fetched = store.fetch(layer_id, ids, rows, scales)
    return (rows[fetched.positions], scales[fetched.positions]), fetched


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_residency_gives_the_rows_of_the_file(
    name: str, stores: dict[str, EngramStore], layer_id: int, truth: Values
) -> None:
    num_rows = truth[0].shape[0]
    random = np.random.default_rng(0)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=60), st.integers(0, 2**32))
    def check(some: list[int], seed: int) -> None:
        ids = np.array([*some, *some[:5], 0, num_rows - 1, num_rows - 1], dtype=np.int64)
        np.random.default_rng(seed).shuffle(ids)
        (rows, scales), fetched = fetch(stores[name], layer_id, ids)
        assert np.array_equal(rows, truth[0][ids])
        assert np.array_equal(scales, truth[1][ids])
        assert (fetched.counters.rows, fetched.counters.distinct_rows) == (ids.size, np.unique(ids).size)

    check()
    batch = random.integers(0, num_rows, (3, 700, 8))  # large enough to be split over threads
    (rows, scales), _ = fetch(stores[name], layer_id, batch)
    assert np.array_equal(rows, truth[0][batch])
    assert np.array_equal(scales, truth[1][batch])


def test_rows_of_dead_tokens_are_the_same_everywhere(
    checkpoint: Checkpoint, stores: dict[str, EngramStore], truth: Values
) -> None:
    """An image position hashes pads only (spec 2.4): its rows exist, are read, and are the same everywhere."""
    import torch

    from engram_trt.plugins.engram_hash.reference import engram_hash

    layout = EngramLayout.from_config(checkpoint.config)
    constants = (torch.tensor(value) for value in (layout.multipliers, layout.primes, layout.offsets))
    dead = torch.full((1, 4), -1)
    history = torch.full((1, layout.multipliers.shape[1] - 1), -1)
    ids = engram_hash(dead, history, *constants, 2).numpy()[:, :, 0]
    for store in stores.values():
        (rows, scales), fetched = fetch(store, checkpoint.config.engram_layer_ids[0], ids)
        assert np.array_equal(rows, truth[0][ids])
        assert np.array_equal(scales, truth[1][ids])
        assert fetched.counters.distinct_rows == ids.shape[-1]


def test_counters_and_report_say_what_was_read(checkpoint: Checkpoint, layer_id: int) -> None:
    store = open_store(checkpoint, EngramPlacement(residency="mmap", cache_mib=1), BACKEND, binds_host=False)
    shape = store.shape(layer_id)
    first = fetch(store, layer_id, np.array([[5, 7, 5], [9, 5, 7]]))[1].counters
    second = fetch(store, layer_id, np.array([7, 11]))[1].counters
    assert (first.rows, first.distinct_rows, first.hits) == (6, 3, 0)
    assert first.num_bytes == 3 * (shape.row_bytes + shape.scale_bytes)
    assert (second.distinct_rows, second.hits, second.num_bytes) == (2, 1, shape.row_bytes + shape.scale_bytes)
    facts = store.report()["layers"][str(layer_id)]
    assert facts["residency"] == "mmap"
    assert facts["fetched"]["hit_rate"] == 1 / 5
    assert 0 < facts["cache_bytes"] <= 1 << 20
    store.close()


def test_ids_outside_the_table_are_refused(stores: dict[str, EngramStore], layer_id: int) -> None:
    for store in stores.values():
        num_rows = store.shape(layer_id).num_rows
        for wrong in (-1, num_rows, 2**40):
            with pytest.raises(RequestError, match=f"row id {wrong}"):
                fetch(store, layer_id, np.array([0, wrong, 3]))
        with pytest.raises(RequestError, match=f"row id {num_rows}"):
            store.rows_bfloat16(layer_id, np.array([num_rows]))


def test_an_error_in_one_part_of_a_split_fetch_is_the_error_of_the_fetch(
    stores: dict[str, EngramStore], layer_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engram_store, "SPLIT_ROWS", 8)
    store = stores["mmap"]
    gather = store.tables[layer_id].gather

    def fails_late(ids: Any, rows: Any, scales: Any) -> None:
        if 77 in ids:
            raise OSError("part of row 77")
        gather(ids, rows, scales)

    monkeypatch.setattr(store.tables[layer_id], "gather", fails_late)
    for _ in range(20):
        with pytest.raises(OSError, match="row 77"):
            fetch(store, layer_id, np.arange(120))
    assert fetch(store, layer_id, np.arange(60))[1].num_rows == 60


def test_fetches_on_every_thread_of_the_pool_do_not_wait_for_each_other(
    checkpoint: Checkpoint, layer_id: int, truth: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch wants helpers from a pool that other fetches fill: a deadlock if it waited for a place."""
    monkeypatch.setattr(engram_store, "SPLIT_ROWS", 16)
    store = open_store(checkpoint, EngramPlacement(residency="mmap", num_threads=2), BACKEND, binds_host=False)
    shape = store.shape(layer_id)
    ids = np.random.default_rng(1).integers(0, shape.num_rows, (24, 300))
    buffers = [[np.empty((300, n), np.uint8) for n in (shape.row_bytes, shape.scale_bytes)] for _ in ids]
    futures = [store.submit(layer_id, part, *buffer) for part, buffer in zip(ids, buffers, strict=True)]
    for part, buffer, future in zip(ids, buffers, futures, strict=True):
        assert np.array_equal(buffer[0][future.result(timeout=60).positions], truth[0][part])
    store.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.booleans())
def test_distinct_ids_are_those_of_numpy(some: list[int], ascending: bool) -> None:
    ids = np.array(sorted(set(some)) if ascending else some, dtype=np.int64)
    distinct, positions = engram_store._distinct(ids)
    expected, inverse = np.unique(ids, return_inverse=True)
    assert np.array_equal(distinct, expected)
    assert np.array_equal(positions, inverse)


# --- the hot-row cache ----------------------------------------------------------------------------------------

SHAPE = TableShape(layer_id=0, num_rows=1000, row_bytes=32, scale_bytes=1)


def row_of(ids: npt.NDArray[np.int64]) -> Values:
    """Rows that say their own id."""
    return np.repeat((ids % 251).astype(np.uint8)[:, None], 32, axis=1), (ids % 13).astype(np.uint8)[:, None]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True), max_size=12), st.integers(0, 3000))
def test_the_cache_gives_right_rows_or_none(fetches: list[list[int]], num_bytes: int) -> None:
    cache = HotRows(SHAPE, num_bytes)
    assert cache.num_bytes <= num_bytes
    for some in fetches:
        ids = np.array(sorted(some), dtype=np.int64)
        rows, scales = np.zeros((ids.size, 32), np.uint8), np.zeros((ids.size, 1), np.uint8)
        if not cache.num_places:
            assert not cache.admits(ids.size)
            continue
        hit = cache.lookup(ids, rows, scales)
        expected = row_of(ids)
        assert np.array_equal(rows[hit], expected[0][hit])
        assert np.array_equal(scales[hit], expected[1][hit])
        cache.admit(ids[~hit], expected[0][~hit], expected[1][~hit])


def test_the_cache_remembers_and_is_not_washed_out() -> None:
    cache = HotRows(SHAPE, 1 << 20)
    assert cache.num_places == 1024  # not more than the table can use
    ids = np.arange(10)
    cache.admit(ids, *row_of(ids))
    assert cache.lookup(ids, *row_of(ids)).all()
    assert cache.admits(cache.num_places // SCAN_SHARE)
    assert not cache.admits(cache.num_places // SCAN_SHARE + 1)


def test_threads_that_share_a_cache_see_whole_rows() -> None:
    cache = HotRows(SHAPE, 1 << 12)
    wrong: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(200):
            ids = np.unique(random.integers(0, 1000, 30))
            rows, scales = np.zeros((ids.size, 32), np.uint8), np.zeros((ids.size, 1), np.uint8)
            hit = cache.lookup(ids, rows, scales)
            wrong.extend(ids[hit][(rows[hit] != row_of(ids[hit])[0]).any(axis=1)].tolist())
            cache.admit(ids, *row_of(ids))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- shards ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400_000_000), st.integers(1, 64))
def test_row_shards_cover_every_row_once_also_where_they_do_not_divide(num_rows: int, num_shards: int) -> None:
    if num_shards > num_rows:
        with pytest.raises(DeploymentError, match=f"at most one per row, {num_rows}"):
            ranges_by_rows(num_rows, num_shards)
        return
    parts = ranges_by_rows(num_rows, num_shards)
    assert len(parts) == num_shards
    assert parts[0].start == 0
    assert parts[-1].stop == num_rows
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert max(part.num_rows for part in parts) == -(-num_rows // num_shards)


def test_column_shards_cut_between_columns() -> None:
    layout = EngramLayout.derive((1, 14), 16000000, 4, 8, 99092)
    parts = ranges_by_columns(layout, 14, 7)
    borders = {*layout.offsets[1].tolist(), 384016682}
    assert [part.start in borders and part.stop in borders for part in parts] == [True] * 7
    assert sum(part.num_rows for part in parts) == 384016682  # spec 2.2
    with pytest.raises(DeploymentError, match="one per hash column, 24"):
        ranges_by_columns(layout, 1, 25)


def test_shards_on_memory_that_the_host_cannot_read_are_refused(checkpoint: Checkpoint) -> None:
    class Remote(OnnxRuntimeBackend):
        name = "remote"

        def allocate(self, dtype: str, num_elements: int) -> Any:
            buffer = super().allocate(dtype, num_elements)
            read = buffer.read
            buffer.read = lambda shape: read(shape).copy()  # type: ignore[method-assign]
            return buffer

    backend = Remote({}, lambda spec, binding: np.zeros(0, dtype=np.int8))
    with pytest.raises(BackendError, match="back end remote: found memory that the host cannot read"):
        open_store(checkpoint, EngramPlacement(residency="device", num_shards=2), backend, binds_host=False)


# --- dequantisation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales_between", [(3, 134), (0, 254), (0, 3), (134, 255)])
def test_bfloat16_rows_are_the_reference_bit_for_bit(scales_between: tuple[int, int]) -> None:
    import torch

    from engram_trt.plugins.engram_gather.reference import engram_gather

    low, high = scales_between
    every_pair = np.stack(np.meshgrid(np.arange(low, high + 1), np.arange(256), indexing="ij"), -1).reshape(-1, 2)
    scales = np.repeat(every_pair[:, :1], 2, axis=1).astype(np.uint8)
    rows = np.repeat(every_pair[:, 1:], 64, axis=1).astype(np.uint8)
    out = np.empty(rows.shape, dtype=np.uint16)
    Dequantizer(64).convert(rows, scales, out)
    ids = torch.arange(rows.shape[0]).view(1, -1, 1)
    signed = (torch.from_numpy(values.view(np.int8)) for values in (rows, scales))
    expected = engram_gather(ids, *signed, 16)[0]
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    numbers = ~torch.isnan(expected)
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_a_store_dequantises_what_it_fetches(stores: dict[str, EngramStore], layer_id: int, truth: Values) -> None:
    ids = np.random.default_rng(3).integers(0, truth[0].shape[0], 5000)
    expected = np.empty((5000, truth[0].shape[1]), dtype=np.uint16)
    Dequantizer(truth[0].shape[1]).convert(truth[0][ids], truth[1][ids], expected)
    for store in stores.values():
        assert np.array_equal(store.rows_bfloat16(layer_id, ids), expected)
