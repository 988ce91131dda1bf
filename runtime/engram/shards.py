"""An Engram table in parts: by equal runs of rows, or by whole hash columns; addressed with 64 bits.

A part is memory that a back end allocated. Gathering from it is a copy on the CPU; a back end whose memory the
host cannot read needs a gather of its own and is refused here. Shards on a GPU are therefore neither there nor
measured; a whole table on a GPU is the back end's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.errors import BackendError, DeploymentError
from engram_trt.runtime.engram.files import Bytes
from engram_trt.runtime.engram.tables import Ids, Table, TableShape
from engram_trt.runtime.stage_runners.contract import Backend, Buffer

_LOAD_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Rows start..stop-1 of a table."""

    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many."""
        return self.stop - self.start


def ranges_by_rows(num_rows: int, num_shards: int) -> tuple[RowRange, ...]:
    """Runs of ceil(num_rows / num_shards) rows, as the reference splits a table; the last ones are shorter.

    Raises:
        DeploymentError: more shards than rows.
    """
    if num_shards > num_rows:
        raise _too_many(num_shards, f"at most one per row, {num_rows}")
    part = -(-num_rows // num_shards)
    starts = (min(shard * part, num_rows) for shard in range(num_shards))
    return tuple(RowRange(start=start, stop=min(start + part, num_rows)) for start in starts)


def ranges_by_columns(layout: EngramLayout, layer_id: int, num_shards: int) -> tuple[RowRange, ...]:
    """Whole hash columns, as evenly as their number allows: a column's rows are one run of the table.

    Raises:
        DeploymentError: more shards than columns.
    """
    index = layout.layer_ids.index(layer_id)
    borders = [*layout.offsets[index].tolist(), layout.num_embeddings[index]]
    num_columns = len(borders) - 1
    if num_shards > num_columns:
        raise _too_many(num_shards, f"at most one per hash column, {num_columns}")
    cuts = [borders[shard * num_columns // num_shards] for shard in range(num_shards + 1)]
    return tuple(RowRange(start=start, stop=stop) for start, stop in pairwise(cuts))


def _too_many(num_shards: int, expected: str) -> DeploymentError:
    return DeploymentError("engram.num_shards", found=str(num_shards), expected=expected, remedy="Choose fewer shards.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    rows_of: RowRange
    rows: Buffer
    scales: Buffer


class ShardedTable(Table):
    """A table in parts.

    Args:
        shape: the whole table.
        ranges: the parts, without gaps, from row 0 to the last.
        backends: holds part i in back end i modulo their number.
        source: filled from there.
    """

    def __init__(
        self, shape: TableShape, ranges: Sequence[RowRange], backends: Sequence[Backend], source: Table
    ) -> None:
        self.shape = shape
        self._shards = [
            _load_shard(part, backends[number % len(backends)], source)
            for number, part in enumerate(ranges)
            if part.num_rows
        ]

    def copy(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        for shard in self._shards:
            part = shard.rows_of
            here = np.flatnonzero((ids >= part.start) & (ids < part.stop))
            if here.size:
                local = ids[here] - part.start
                rows[here] = _values(shard.rows, part.num_rows)[local]
                scales[here] = _values(shard.scales, part.num_rows)[local]

    def facts(self) -> dict[str, Any]:
        return {"shards": [[shard.rows_of.start, shard.rows_of.stop] for shard in self._shards]}


def _values(buffer: Buffer, num_rows: int) -> Bytes:
    return buffer.read((num_rows, buffer.num_elements // num_rows)).view(np.uint8)


def _load_shard(part: RowRange, backend: Backend, source: Table) -> _Shard:
    widths = source.shape.row_bytes, source.shape.scale_bytes
    buffers = [backend.allocate("int8", part.num_rows * width) for width in widths]
    _require_readable(backend.name, buffers[1].read)
    for start in range(part.start, part.stop, _LOAD_ROWS):
        ids = np.arange(start, min(start + _LOAD_ROWS, part.stop), dtype=np.int64)
        values = [np.empty((ids.size, width), dtype=np.uint8) for width in widths]
        source.gather(ids, *values)
        for buffer, block, width in zip(buffers, values, widths, strict=True):
            buffer.write(block.view(np.int8), (start - part.start) * width)
    return _Shard(rows_of=part, rows=buffers[0], scales=buffers[1])


def _require_readable(backend: str, read: Callable[[tuple[int, ...]], Any]) -> None:
    """A buffer whose `read` copies would copy a whole shard for every fetch."""
    if not np.shares_memory(read((1,)), read((1,))):
        raise BackendError(
            f"back end {backend}",
            found="memory that the host cannot read",
            expected="a back end on the CPU: there is no gather from shards on a device yet",
            remedy="Set engram.num_shards = 1, or choose 'host' or 'mmap'.",
        )
