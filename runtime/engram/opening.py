"""Open the Engram store that a deployment asks for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.engram.files import unreadable
from engram_trt.runtime.engram.host import HostTable, load_host_table, packed_parts, shard_parts
from engram_trt.runtime.engram.memory import available_memory
from engram_trt.runtime.engram.packed import PackedTable, damaged, packed_path, require_same_rows
from engram_trt.runtime.engram.shards import ShardedTable, ranges_by_columns, ranges_by_rows
from engram_trt.runtime.engram.staging import ROWS, SCALES
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import MappedTable, ShardFiles, Table, TableShape, table_entries, table_names
from engram_trt.runtime.stage_runners.contract import Array, Backend, ResidentArrays

AUTO_RESIDENT_BYTES = 256 << 20
"""A table up to this size is resident by itself, if it takes a small part of the memory that is left."""
_AUTO_MEMORY_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    checkpoint: Checkpoint
    placement: EngramPlacement
    backend: Backend
    binds_host: bool
    files: ShardFiles
    digests: Mapping[str, str | None]

    def resolved(self, layer_id: int) -> str:
        """The residency with `auto` decided."""
        residency = self.placement.of_layer(layer_id)
        if residency != "auto":
            return residency
        num_bytes = table_entries(self.checkpoint, layer_id)[2].num_bytes
        is_small = num_bytes <= min(AUTO_RESIDENT_BYTES, available_memory() // _AUTO_MEMORY_SHARE)
        return "device" if is_small else "mmap"

    def table(self, layer_id: int, residency: str) -> Table | None:
        """The table in its place; None where the back end holds it by itself."""
        rows, scales, shape = table_entries(self.checkpoint, layer_id)
        placement = self.placement
        if residency == "device" and placement.num_shards == 1:
            return self._host(shape, rows, scales, share=False) if self.binds_host else None
        if residency == "host":
            return self._host(shape, rows, scales, share=placement.share_host)
        source = self._source(shape, rows, scales, packed=residency == "packed" or residency != "mmap")
        if residency != "device":
            return source
        if placement.shard_by == "rows":
            ranges = ranges_by_rows(shape.num_rows, placement.num_shards)
        else:
            layout = EngramLayout.from_config(self.checkpoint.config)
            ranges = ranges_by_columns(layout, layer_id, placement.num_shards)
        return ShardedTable(shape, ranges, [self.backend], source)

    def _source(self, shape: TableShape, rows: TensorEntry, scales: TensorEntry, *, packed: bool) -> Table:
        """The packed file, if it is wanted and there is to be one; else the shards."""
        mapped = MappedTable(shape, rows, scales, self.files)
        if not packed or not self.placement.packed_folder:
            return mapped
        path = packed_path(Path(self.placement.packed_folder), shape.layer_id)
        table = PackedTable(path, shape)
        self._require_own(table)
        require_same_rows(table, mapped)
        return table

    def _require_own(self, table: PackedTable) -> None:
        """Refuse a packed file of another checkpoint by its digests."""
        header = table.header
        pairs = [(header.source_digest, self.checkpoint.header_digest)]
        names = table_names(header.layer_id)
        for name, found in zip(names, (header.rows_sha256, header.scales_sha256), strict=True):
            known = self.digests.get(name)
            pairs += [(found, known)] if known else []
        for found, expected in pairs:
            if found != expected:
                raise damaged(
                    str(table.path),
                    f"a packed table of another checkpoint ({found[:12]}...)",
                    f"the one of {self.checkpoint.root} ({expected[:12]}...)",
                )

    def _host(self, shape: TableShape, rows: TensorEntry, scales: TensorEntry, *, share: bool) -> HostTable:
        source = self._source(shape, rows, scales, packed=True)
        entries = (rows, scales)
        parts = partial(packed_parts, source.path) if isinstance(source, PackedTable) else partial(shard_parts, entries)
        try:
            return load_host_table(
                shape, parts, identity=_content_identity(entries), num_threads=self.placement.num_threads, share=share
            )
        finally:
            source.close()


def _content_identity(entries: tuple[TensorEntry, ...]) -> str:
    """Names the bytes of a table without reading them: the files they are in, as they are now."""
    stats = []
    for entry in entries:
        try:
            stats.append((os.stat(entry.shard), entry.offset))
        except OSError as cause:
            raise unreadable(entry.shard, entry.name, cause.strerror or str(cause)) from None
    return "|".join(f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{offset}" for s, offset in stats)


def bound_arrays(store: EngramStore, others: ResidentArrays) -> ResidentArrays:
    """Resident weights with the store's own tables in place of the mapped ones.

    Args:
        store: has the tables that are bound whole.
        others: all other resident weights.
    """

    def resident(spec: StageSpec, binding: str) -> Array:
        table = None if spec.layer_id not in store.direct else store.tables[spec.layer_id or 0]
        if isinstance(table, HostTable) and binding in (ROWS, SCALES):
            return (table.rows if binding == ROWS else table.scales).view(np.int8)
        return others(spec, binding)

    return resident


def open_store(
    checkpoint: Checkpoint,
    placement: EngramPlacement,
    backend: Backend,
    *,
    binds_host: bool,
    digests: Mapping[str, str | None] | None = None,
    only_layers: Collection[int] | None = None,
) -> EngramStore:
    """Open every Engram table of a checkpoint where the deployment wants it.

    Args:
        checkpoint: has the tables.
        placement: where each goes.
        backend: holds the parts of sharded tables.
        binds_host: the back end can bind host memory as a table; `host` tables are then bound whole.
        digests: checkpoint tensor name -> SHA-256 of its bytes, where known.
        only_layers: leave the tables of other layers alone.

    Raises:
        CheckpointError: a table, shard or packed file that cannot be used.
        DeploymentError: too little memory, or an impossible number of shards.
        BackendError: the back end cannot hold parts.
    """
    files = ShardFiles(checkpoint.shard_sizes)
    opening = _Opening(
        checkpoint=checkpoint,
        placement=placement,
        backend=backend,
        binds_host=binds_host,
        files=files,
        digests=digests or {},
    )
    layers = checkpoint.config.engram_layer_ids
    if checkpoint.partial_layers is not None:
        layers = tuple(layer_id for layer_id in layers if layer_id in checkpoint.partial_layers)
    if only_layers is not None:
        layers = tuple(layer_id for layer_id in layers if layer_id in only_layers)
    residencies = {layer_id: opening.resolved(layer_id) for layer_id in layers}
    tables: dict[int, Table] = {}
    try:
        for layer_id, residency in residencies.items():
            table = opening.table(layer_id, residency)
            if table is not None:
                tables[layer_id] = table
    except BaseException:
        for table in tables.values():
            table.close()
        files.close()
        raise
    in_memory = {layer_id for layer_id, table in tables.items() if isinstance(table, HostTable)}
    return EngramStore(
        tables,
        direct=frozenset(in_memory if binds_host else ()),
        residencies=residencies,
        num_threads=placement.num_threads,
        cache_bytes=placement.cache_mib << 20,
        cached=frozenset(layer_id for layer_id, name in residencies.items() if name in ("mmap", "packed")),
        on_close=files.close,
    )
