"""Rows of a step, fetched while its first stages run.

The ids of a step are known after stage `engram_hash`. From there on the store's pool fetches the distinct rows
of every Engram layer into a staging buffer; the block of such a layer is bound to the staging buffer in place of
the table, and to positions in it in place of row ids. The graph does not change, and the block waits only if its
rows are late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.engram.files import Bytes
from engram_trt.runtime.engram.store import EngramStore, FetchCounters, Fetched
from engram_trt.runtime.stage_runners.contract import Backend, Buffer, Run, View

IDS, ROWS, SCALES = "engram_ids", "engram_rows", "engram_scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """One layer's host memory and the back end's buffers behind it; all at the largest size of a step.

    Attributes:
        rows, scales: [n, width], where a fetch puts them.
        is_direct: that is the memory of the buffers, so nothing has to be copied on.
    """

    rows: Bytes
    scales: Bytes
    is_direct: bool
    ids_buffer: Buffer
    rows_buffer: Buffer
    scales_buffer: Buffer


class EngramStaging:
    """Staging buffers of one session.

    Args:
        store: has the rows.
        placed: every stage that runs here, with the back end that allocates the buffers it is bound to.
        limits: largest value of every symbol.
    """

    def __init__(
        self, store: EngramStore, placed: Iterable[tuple[StageSpec, Backend]], limits: Mapping[str, int]
    ) -> None:
        self.store = store
        self.counters: dict[int, FetchCounters] = {}
        """Layer -> what the last step fetched and waited."""
        self._staged: dict[int, _Staged] = {}
        self._pending: dict[int, Future[Fetched]] = {}
        for stage, backend in placed:
            layer_id = _reading_layer(stage)
            if layer_id is not None and layer_id in store.fetched_layers:
                num_ids = int(np.prod(stage.input(IDS).resolve(limits)))
                self._staged[layer_id] = _allocate(store, layer_id, backend, num_ids)

    def to_json(self) -> dict[str, Any]:
        """Counters of the last step, by layer and together, as plain JSON."""
        total = sum(self.counters.values(), FetchCounters())
        layers = {str(layer_id): counters.to_json() for layer_id, counters in sorted(self.counters.items())}
        return {"layers": layers, "total": total.to_json()}

    def views(self, stage: StageSpec, sizes: Mapping[str, int]) -> dict[str, View]:
        """Binding name -> view of the inputs of a stage that come from here; empty for most stages."""
        layer_id = _reading_layer(stage)
        if layer_id is None or layer_id not in self._staged:
            return {}
        staged = self._staged[layer_id]
        ids = staged.ids_buffer.view(stage.input(IDS).resolve(sizes))
        num_rows = int(np.prod(ids.shape))
        return {
            IDS: ids,
            ROWS: staged.rows_buffer.view((num_rows, staged.rows.shape[1])),
            SCALES: staged.scales_buffer.view((num_rows, staged.scales.shape[1])),
        }

    def fetch_run(self, stage: StageSpec, outputs: Mapping[str, View]) -> Run | None:
        """What to run after a stage that puts out row ids: start all fetches. None for any other stage."""
        sources = {
            spec.owner: outputs[spec.key]
            for spec in stage.outputs
            if spec.tensor == IDS and spec.owner is not None and spec.owner in self._staged
        }
        return self._fetch(sources) if sources else None

    def fetch_incoming(self, inputs: Mapping[str, View]) -> Run | None:
        """What to run first where row ids come from another process: start those fetches. None where none do."""
        keys = {f"layers.{layer_id}.{IDS}": layer_id for layer_id in self._staged}
        sources = {layer_id: inputs[key] for key, layer_id in keys.items() if key in inputs}
        return self._fetch(sources) if sources else None

    def _fetch(self, sources: Mapping[int, View]) -> Run:
        def start() -> None:
            self._drain()
            self.counters = {}
            for layer_id, view in sources.items():
                staged = self._staged[layer_id]
                ids = np.array(view.read(), dtype=np.int64)
                self._pending[layer_id] = self.store.submit(layer_id, ids, staged.rows, staged.scales)

        return start

    def wait_run(self, stage: StageSpec, views: Mapping[str, View]) -> Run | None:
        """What to run before a stage that reads rows: wait for them and hand them over. None for others."""
        layer_id = _reading_layer(stage)
        if layer_id is None or layer_id not in self._staged:
            return None
        staged, ids_view = self._staged[layer_id], views[IDS]

        def wait() -> None:
            started = perf_counter()
            fetched = self._pending[layer_id].result()
            waited = (perf_counter() - started) * 1e3
            del self._pending[layer_id]
            count = fetched.num_rows
            if not staged.is_direct:
                staged.rows_buffer.write(staged.rows[:count].view(np.int8))
                staged.scales_buffer.write(staged.scales[:count].view(np.int8))
            ids_view.write(fetched.positions)
            self.counters[layer_id] = replace(fetched.counters, wait_ms=waited)

        return wait

    def _drain(self) -> None:
        """Let the fetches of a step that was abandoned end: they write into these buffers."""
        if self._pending:
            wait_for_all(self._pending.values())
            self._pending.clear()


def _reading_layer(stage: StageSpec) -> int | None:
    """The Engram layer whose rows a stage reads; None for other stages, those of an Engram layer among them."""
    return next((spec.owner for spec in stage.inputs if spec.tensor == IDS), None)


def _allocate(store: EngramStore, layer_id: int, backend: Backend, num_ids: int) -> _Staged:
    shape = store.shape(layer_id)
    widths = shape.row_bytes, shape.scale_bytes
    buffers = [backend.allocate("int8", num_ids * width) for width in widths]
    own = [_memory(buffer, (num_ids, width)) for buffer, width in zip(buffers, widths, strict=True)]
    host = [
        np.zeros((num_ids, width), np.uint8) if found is None else found
        for found, width in zip(own, widths, strict=True)
    ]
    return _Staged(
        rows=host[0],
        scales=host[1],
        is_direct=all(found is not None for found in own),
        ids_buffer=backend.allocate("int64", num_ids),
        rows_buffer=buffers[0],
        scales_buffer=buffers[1],
    )


def _memory(buffer: Buffer, shape: tuple[int, int]) -> Bytes | None:
    """A buffer's own memory, if the host can write to it; None where reading makes a copy."""
    found = buffer.read(shape)
    is_own = found.flags.writeable and np.shares_memory(found, buffer.read(shape))
    return found.view(np.uint8) if is_own else None
