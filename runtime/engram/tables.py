"""One Engram table in one of its places; all give the same bytes for the same rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.runtime.engram.files import Bytes, MappedFile, Pending, UnreadablePageError, unreadable

Ids = npt.NDArray[np.int64]

GROUP = 32
"""Features that share a scale (spec 3)."""
ROWS_DTYPE, SCALES_DTYPE = "F8_E4M3", "F8_E8M0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Rows of a table and bytes of one: `row_bytes` E4M3 features, `scale_bytes` E8M0 scales."""

    layer_id: int
    num_rows: int
    row_bytes: int
    scale_bytes: int

    @property
    def record_bytes(self) -> int:
        """A row with its scales."""
        return self.row_bytes + self.scale_bytes

    @property
    def num_bytes(self) -> int:
        """The whole table."""
        return self.num_rows * self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where rows lie, for code that reads them in place.

    Attributes:
        rows, scales: uint8, one dimension, read-only: the bytes in which the starts count.
        row_starts, scale_starts: int64 [n], first byte of every row and of its scales.
    """

    rows: Bytes
    row_starts: Ids
    scales: Bytes
    scale_starts: Ids


class Table(ABC):
    """Rows by id.

    Args:
        shape: what it holds.
    """

    shape: TableShape

    def check(self) -> None:  # noqa: B027 - memory does not change behind one's back
        """Refuse a source that changed since it was opened; CheckpointError."""

    def gather(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        """`prepare`, then `copy`.

        Args:
            ids: [n] int64, each in 0..num_rows-1; quickest in ascending order, the order of the file.
            rows: [n, row_bytes], receives the features.
            scales: [n, scale_bytes], receives the scales.

        Raises:
            CheckpointError: naming file and row, when the bytes cannot be had.
        """
        self.prepare(ids)
        self.copy(ids, rows, scales)

    def prepare(self, ids: Ids) -> None:  # noqa: B027 - memory needs no preparation
        """Bring rows from the disk; must come before `copy`. By several threads at once, as `copy`."""

    @abstractmethod
    def copy(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        """Copy rows that are there; see `gather`."""

    def locate(self, ids: Ids) -> Located | None:
        """Where rows lie that are there (see `prepare`); None where the host cannot read them in place.

        Args:
            ids: [n] int64, each in 0..num_rows-1.
        """
        return None

    def facts(self) -> dict[str, Any]:
        """What a report says of it besides its size; plain JSON."""
        return {}

    def close(self) -> None:  # noqa: B027 - most tables hold nothing that needs closing
        """Release what is not memory."""


def table_names(layer_id: int) -> tuple[str, str]:
    """Checkpoint names of a table's features and scales."""
    prefix = f"layers.{layer_id}.engram.embed"
    return f"{prefix}.weight", f"{prefix}.scale"


def table_entries(checkpoint: Checkpoint, layer_id: int) -> tuple[TensorEntry, TensorEntry, TableShape]:
    """Where a table lies in its checkpoint, held against the rows that the model's primes ask for.

    Raises:
        CheckpointError: other dtypes, or other shapes than the derived ones.
    """
    config = checkpoint.config
    rows, scales = (checkpoint.entry(name) for name in table_names(layer_id))
    layout = EngramLayout.from_config(config)
    num_rows = layout.num_embeddings[layout.layer_ids.index(layer_id)]
    width = config.engram_head_dim
    for entry, dtype, columns in ((rows, ROWS_DTYPE, width), (scales, SCALES_DTYPE, width // GROUP)):
        if entry.dtype != dtype or entry.shape != (num_rows, columns):
            raise CheckpointError(
                f"{entry.shard}: {entry.name}",
                found=f"{entry.dtype} {list(entry.shape)}",
                expected=f"{dtype} {[num_rows, columns]}: the rows are the sum of the layer's primes",
                remedy="Use the config.json and shards of one revision.",
            )
    shape = TableShape(layer_id=layer_id, num_rows=num_rows, row_bytes=width, scale_bytes=width // GROUP)
    return rows, scales, shape


class MappedTable(Table):
    """A table straight from the checkpoint's shards.

    Args:
        shape: what it holds.
        rows, scales: the two tensors.
        files: maps a shard, once for tables that share it.
    """

    def __init__(self, shape: TableShape, rows: TensorEntry, scales: TensorEntry, files: ShardFiles) -> None:
        self.shape = shape
        self._rows = _MappedTensor(rows, files.open(rows.shard))
        self._scales = _MappedTensor(scales, files.open(scales.shard))
        both, same = (self._rows, self._scales), self._rows.file is self._scales.file
        self._groups = [_OneFile(both)] if same else [_OneFile((tensor,)) for tensor in both]

    def check(self) -> None:
        for group in self._groups:
            group.file.check()

    def prepare(self, ids: Ids) -> None:
        # All pages are asked for before any is waited for.
        awaited = [(group, group.request(ids)) for group in self._groups]
        for group, pending in awaited:
            group.populate(ids, pending)

    def copy(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        self._rows.take(ids, rows)
        self._scales.take(ids, scales)

    def locate(self, ids: Ids) -> Located:
        rows, scales = self._rows, self._scales
        return Located(
            rows=rows.file.bytes, row_starts=rows.starts(ids), scales=scales.file.bytes, scale_starts=scales.starts(ids)
        )


class ShardFiles:
    """Shards mapped on first use.

    Args:
        sizes: bytes of every shard, as its header says.
    """

    def __init__(self, sizes: dict[Path, int]) -> None:
        self._sizes = sizes
        self._files: dict[Path, MappedFile] = {}

    def open(self, path: Path) -> MappedFile:
        """The mapped shard; CheckpointError when it cannot be opened or has another size."""
        if path not in self._files:
            self._files[path] = MappedFile(path, self._sizes[path])
        return self._files[path]

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _MappedTensor:
    """[rows, width] bytes inside a mapped file."""

    def __init__(self, entry: TensorEntry, file: MappedFile) -> None:
        self.name, self.file, self.offset, self.width = entry.name, file, entry.offset, entry.shape[1]
        self._values: npt.NDArray[Any] = file.bytes[entry.offset : entry.offset + entry.nbytes].reshape(entry.shape)
        self._item: type[np.generic] | None = None
        if self.width == 8 and entry.offset % 8 == 0:
            # One number instead of eight bytes: numpy copies it without a call.
            self._item = np.int64
            self._values = self._values.reshape(-1).view(np.int64)

    def starts(self, ids: Ids) -> Ids:
        """First byte of every row in the file."""
        return ids * self.width + self.offset

    def take(self, ids: Ids, out: Bytes) -> None:
        """Copy rows; "clip" because any other mode of numpy's copies once more, and ids are in range."""
        target = out if self._item is None else out.reshape(-1).view(self._item)
        np.take(self._values, ids, axis=0, out=target, mode="clip")


class _OneFile:
    """Tensors in one mapped file, whose pages are prepared together."""

    def __init__(self, tensors: tuple[_MappedTensor, ...]) -> None:
        self.file, self._tensors = tensors[0].file, tensors
        self._widths = np.array([[tensor.width] for tensor in tensors])
        self._offsets = np.array([[tensor.offset] for tensor in tensors])

    def request(self, ids: Ids) -> Pending | None:
        """See `MappedFile.request`."""
        starts = ids * self._widths
        starts += self._offsets
        return self.file.request(starts, self._widths)

    def populate(self, ids: Ids, pending: Pending | None) -> None:
        """See `MappedFile.populate`; CheckpointError with the row."""
        try:
            self.file.populate(pending)
        except UnreadablePageError as error:
            tensor, place = divmod(error.index, ids.shape[0])
            what = f"{self._tensors[tensor].name}, row {int(ids[place])}"
            raise unreadable(self.file.path, what, error.reason) from None


class MemoryTable(Table):
    """A table in the memory of this machine.

    Args:
        shape: what it holds.
        rows: [num_rows, row_bytes].
        scales: [num_rows, scale_bytes].
    """

    def __init__(self, shape: TableShape, rows: Bytes, scales: Bytes) -> None:
        self.shape, self.rows, self.scales = shape, rows, scales

    def copy(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        np.take(self.rows, ids, axis=0, out=rows, mode="clip")
        np.take(self.scales, ids, axis=0, out=scales, mode="clip")

    def locate(self, ids: Ids) -> Located:
        return Located(
            rows=_flat(self.rows),
            row_starts=ids * self.shape.row_bytes,
            scales=_flat(self.scales),
            scale_starts=ids * self.shape.scale_bytes,
        )


def _flat(values: Bytes) -> Bytes:
    """A read-only view of a contiguous array."""
    view = values.reshape(-1)
    view.flags.writeable = False
    return view
