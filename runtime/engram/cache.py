"""A bounded cache of hot rows in front of a table that is not in memory."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from engram_trt.runtime.engram.files import Bytes
from engram_trt.runtime.engram.tables import Ids, TableShape

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = -1
SCAN_SHARE = 16
"""A fetch of more rows than this part of the cache is not admitted: one long prompt would wash it out."""


class HotRows:
    """Direct-mapped: a row has one place, and the newest row there stays.

    Looking up and admitting n rows are a few passes of compiled code. The kernel's page cache keeps 4 KiB for a
    row of 264 bytes; this keeps the row, so the same memory holds fifteen times as many.

    Args:
        shape: of the table.
        num_bytes: memory it may use; the number of places is the power of two below.
    """

    def __init__(self, shape: TableShape, num_bytes: int) -> None:
        per_row = shape.record_bytes + np.dtype(np.int64).itemsize
        # Never more places than the table has rows, up to the next power of two.
        places = min(num_bytes // per_row, 2 * shape.num_rows - 1)
        self._bits = max(places.bit_length() - 1, 0)
        self.num_places = 1 << self._bits if places else 0
        self.num_bytes = self.num_places * per_row
        self._ids = np.full(self.num_places, _EMPTY, dtype=np.int64)
        self._rows = np.empty((self.num_places, shape.row_bytes), dtype=np.uint8)
        self._scales = np.empty((self.num_places, shape.scale_bytes), dtype=np.uint8)
        self._lock = threading.Lock()

    def admits(self, num_rows: int) -> bool:
        """Whether a fetch of so many rows goes through the cache."""
        return 0 < num_rows <= self.num_places // SCAN_SHARE

    def lookup(self, ids: Ids, rows: Bytes, scales: Bytes) -> npt.NDArray[np.bool_]:
        """Copy the rows that are here to their places in `rows` and `scales`; returns which, [n] bool.

        The places of rows that are not here are overwritten with anything.
        """
        places = self._places(ids)
        with self._lock:
            hit: npt.NDArray[np.bool_] = self._ids[places] == ids
            if hit.any():
                # Every place, those of other rows too: one call instead of three.
                np.take(self._rows, places, axis=0, out=rows, mode="clip")
                np.take(self._scales, places, axis=0, out=scales, mode="clip")
        return hit

    def admit(self, ids: Ids, rows: Bytes, scales: Bytes) -> None:
        """Keep rows that were just fetched."""
        places = self._places(ids)
        if len(set(places.tolist())) < ids.size:
            # Of rows with one place the last would win in every array, but numpy does not promise it: keep the first.
            places, first = np.unique(places, return_index=True)
            ids, rows, scales = ids[first], rows[first], scales[first]
        with self._lock:
            self._ids[places] = _EMPTY  # an interrupt below leaves an empty place, not a wrong row
            self._rows[places] = rows
            self._scales[places] = scales
            self._ids[places] = ids

    def _places(self, ids: Ids) -> npt.NDArray[np.int64]:
        if not self._bits:
            return np.zeros(ids.shape, dtype=np.int64)
        spread = ids.view(np.uint64) * _SPREAD
        spread >>= np.uint64(64 - self._bits)
        return spread.view(np.int64)
