"""`EngramStore`: rows of the Engram tables, wherever they live; the choice costs nothing and changes no result."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.engram.bfloat16_rows import dequantize_rows
from engram_trt.runtime.engram.cache import HotRows
from engram_trt.runtime.engram.compiled import compiled_convert
from engram_trt.runtime.engram.dequantize import Bfloat16Bits
from engram_trt.runtime.engram.files import Bytes
from engram_trt.runtime.engram.scales import check_scales, table_place
from engram_trt.runtime.engram.tables import Ids, Table, TableShape

SPLIT_ROWS = 2048
"""Rows that are worth another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCounters:
    """What one fetch did.

    Attributes:
        rows: ids asked for, repetitions included.
        distinct_rows: rows that were delivered.
        hits: of those, how many came from the hot-row cache.
        num_bytes: bytes read from the table, without the hits.
        wait_ms: how long a stage that needed the rows had to wait for them.
    """

    rows: int = 0
    distinct_rows: int = 0
    hits: int = 0
    num_bytes: int = 0
    wait_ms: float = 0.0

    def __add__(self, other: FetchCounters) -> FetchCounters:
        return FetchCounters(
            rows=self.rows + other.rows,
            distinct_rows=self.distinct_rows + other.distinct_rows,
            hits=self.hits + other.hits,
            num_bytes=self.num_bytes + other.num_bytes,
            wait_ms=self.wait_ms + other.wait_ms,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rows": self.rows,
            "distinct_rows": self.distinct_rows,
            "hits": self.hits,
            "bytes": self.num_bytes,
            "wait_ms": round(self.wait_ms, 6),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Rows of one fetch.

    Attributes:
        positions: for every id, in its shape, where its row stands among the distinct ones; int64.
        num_rows: distinct rows.
        counters: what was done.
    """

    positions: Ids
    num_rows: int
    counters: FetchCounters


class EngramStore:
    """Tables by layer, one bounded pool of threads, one hot-row cache for each table that has one.

    Args:
        tables: layer -> its table, for the layers whose rows are fetched or bound from here. Other Engram layers
            are the back end's own.
        direct: layers among them that are bound whole, without a fetch.
        residencies: Engram layer -> where its table lives, for reports.
        num_threads: threads of the pool.
        cache_bytes: memory of each hot-row cache; 0 for none.
        cached: layers that get one.
    """

    def __init__(
        self,
        tables: Mapping[int, Table],
        *,
        direct: frozenset[int] = frozenset(),
        residencies: Mapping[int, str] | None = None,
        num_threads: int = 2,
        cache_bytes: int = 0,
        cached: frozenset[int] = frozenset(),
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.tables, self.direct = dict(tables), direct
        self.residencies = dict(residencies or {})
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="engram")
        self._caches = {layer_id: HotRows(tables[layer_id].shape, cache_bytes) for layer_id in cached if cache_bytes}
        self._totals = dict.fromkeys(self.tables, FetchCounters())
        self._totals_lock = threading.Lock()
        self._on_close = on_close

    @property
    def fetched_layers(self) -> tuple[int, ...]:
        """Layers whose rows are fetched step by step."""
        return tuple(layer_id for layer_id in self.tables if layer_id not in self.direct)

    def shape(self, layer_id: int) -> TableShape:
        """Rows and widths of a layer's table."""
        return self.tables[layer_id].shape

    def submit(self, layer_id: int, ids: Ids, rows: Bytes, scales: Bytes) -> Future[Fetched]:
        """`fetch` on the pool; ids and buffers must not change until it is done."""
        return self._pool.submit(self.fetch, layer_id, ids, rows, scales)

    def fetch(self, layer_id: int, ids: Ids, rows: Bytes, scales: Bytes) -> Fetched:
        """Deliver the distinct rows of some ids, in the order of the file.

        Args:
            layer_id: whose table.
            ids: int64, any shape, repetitions allowed.
            rows: uint8 [at least ids.size, row_bytes], receives the features of the distinct rows.
            scales: uint8 [at least ids.size, scale_bytes], receives their scales.

        Raises:
            RequestError: an id outside the table.
            CheckpointError: the source changed, cannot be read, or has a scale that is not a number.
        """
        table = self.tables[layer_id]
        distinct, positions = _distinct(ids.reshape(-1))
        self._check_range(table.shape, distinct)
        table.check()
        count = distinct.shape[0]
        hits = self._gather(layer_id, table, distinct, rows[:count], scales[:count])
        check_scales(table.shape, distinct, scales[:count])
        counters = FetchCounters(
            rows=ids.size,
            distinct_rows=count,
            hits=hits,
            num_bytes=(count - hits) * table.shape.record_bytes,
        )
        with self._totals_lock:
            self._totals[layer_id] += counters
        return Fetched(positions=positions.reshape(ids.shape), num_rows=count, counters=counters)

    def rows_bfloat16(self, layer_id: int, ids: Ids, out: Bfloat16Bits | None = None) -> Bfloat16Bits:
        """Dequantised rows, as `EngramGather` puts them out (spec 3).

        Args:
            layer_id: whose table.
            ids: [n] int64.
            out: uint16 [n, row_bytes] to fill; a new array without it.

        Returns:
            uint16 [n, row_bytes]: bfloat16 bits.

        Raises:
            ValueError: `out` has another shape or type.
            as `fetch`.
        """
        shape = self.shape(layer_id)
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        if ids.size:
            self._check_range(shape, np.array([ids.min(), ids.max()]))
        target = np.empty((ids.size, shape.row_bytes), dtype=np.uint16) if out is None else out
        if target.shape != (ids.size, shape.row_bytes) or target.dtype != np.uint16:
            raise ValueError(f"out is {target.dtype} {target.shape}, not uint16 {(ids.size, shape.row_bytes)}")
        table = self.tables[layer_id]
        table.check()
        loop = compiled_convert(ids.size) if target.flags.c_contiguous else None
        self._in_parts(ids.size, lambda part: dequantize_rows(table, ids[part], target[part], loop))
        return target

    def report(self) -> dict[str, Any]:
        """Where every table lives and what all sessions fetched so far (waits are a session's), as plain JSON."""
        layers = {}
        for layer_id, residency in sorted(self.residencies.items()):
            facts: dict[str, Any] = {"residency": residency}
            table = self.tables.get(layer_id)
            if table is not None:
                facts |= {"table_bytes": table.shape.num_bytes, **table.facts()}
                totals = self._totals[layer_id]
                facts["fetched"] = totals.to_json() | {"hit_rate": totals.hits / max(totals.distinct_rows, 1)}
            if layer_id in self._caches:
                facts["cache_bytes"] = self._caches[layer_id].num_bytes
            layers[str(layer_id)] = facts
        return {"threads": self.num_threads, "layers": layers}

    def close(self) -> None:
        """Wait for running fetches, then release files and memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for table in self.tables.values():
            table.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _gather(self, layer_id: int, table: Table, ids: Ids, rows: Bytes, scales: Bytes) -> int:
        """Fill rows and scales; returns the number of rows that came from the cache."""
        cache = self._caches.get(layer_id)
        if cache is None or not cache.admits(ids.shape[0]):
            self._in_parts(ids.shape[0], lambda part: table.gather(ids[part], rows[part], scales[part]))
            return 0
        hit = cache.lookup(ids, rows, scales)
        places = np.flatnonzero(~hit)
        if places.size == ids.shape[0]:
            self._in_parts(ids.shape[0], lambda part: table.gather(ids[part], rows[part], scales[part]))
            cache.admit(ids, rows, scales)
        elif places.size:
            missing = ids[places]
            new_rows = np.empty((places.size, rows.shape[1]), dtype=np.uint8)
            new_scales = np.empty((places.size, scales.shape[1]), dtype=np.uint8)
            self._in_parts(places.size, lambda part: table.gather(missing[part], new_rows[part], new_scales[part]))
            rows[places], scales[places] = new_rows, new_scales
            cache.admit(missing, new_rows, new_scales)
        return int(ids.shape[0] - places.size)

    def _in_parts(self, num_rows: int, work: Callable[[slice], None]) -> None:
        """Run work over 0..num_rows-1, in parts on idle threads of the pool where that pays.

        The caller works too and takes back what no thread has begun, so a fetch that itself runs on the pool
        never waits for a place in it.
        """
        if num_rows < 2 * SPLIT_ROWS or self.num_threads == 1:
            work(slice(0, num_rows))
            return
        parts = deque(slice(start, min(start + SPLIT_ROWS, num_rows)) for start in range(0, num_rows, SPLIT_ROWS))

        def drain() -> None:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    return
                work(part)

        helpers = [self._pool.submit(drain) for _ in range(min(self.num_threads, len(parts)) - 1)]
        try:
            drain()
        except BaseException:
            parts.clear()
            raise
        finally:
            begun = [helper for helper in helpers if not helper.cancel()]
            errors = [helper.exception() for helper in begun]
        for error in errors:
            if error is not None:
                raise error

    @staticmethod
    def _check_range(shape: TableShape, ascending: Ids) -> None:
        if not ascending.size or (ascending[0] >= 0 and ascending[-1] < shape.num_rows):
            return
        wrong = int(ascending[0]) if ascending[0] < 0 else int(ascending[-1])
        raise RequestError(
            table_place(shape),
            found=f"row id {wrong}",
            expected=f"0..{shape.num_rows - 1}",
            remedy="Hash stage and table do not belong together: export the checkpoint again.",
        )


def _distinct(ids: Ids) -> tuple[Ids, Ids]:
    """Ascending distinct ids, and the place of every id among them (`np.unique`, lighter)."""
    if (ids[1:] > ids[:-1]).all():  # the columns of one token, as their rows follow each other in the table
        return ids, np.arange(ids.size)
    order = np.argsort(ids)
    ascending = ids[order]
    is_new = np.ones(ids.size, dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    positions = np.empty(ids.size, dtype=np.int64)
    positions[order] = np.cumsum(is_new) - 1
    return ascending[is_new], positions
