"""The Engram token cache: the last compressed ids of every row, kept between steps (spec 2.4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DEAD = -1
"""Compressed id of an image position, and of a position before the sequence begins."""

Ids = npt.NDArray[np.int64]


class TokenCache:
    """Per row, enough recent compressed ids to hash the next token, also after a rollback.

    Args:
        max_batch: rows.
        history: ids a hash looks back on (max_ngram_size - 1).
        max_rollback: ids that may be taken back.
    """

    def __init__(self, max_batch: int, history: int, max_rollback: int) -> None:
        self.history = history
        self._ids: Ids = np.full((max_batch, history + max_rollback), DEAD, dtype=np.int64)

    def copy(self) -> TokenCache:
        """An independent cache with the same contents."""
        other = TokenCache(0, self.history, 0)
        other._ids = self._ids.copy()
        return other

    def recent(self, num_rows: int) -> Ids:
        """The look-back of rows 0..num_rows-1: [num_rows, history], oldest first, DEAD where nothing was."""
        return self._ids[:num_rows, self._ids.shape[1] - self.history :]

    def append(self, row: int, compressed_ids: Ids) -> None:
        """Add a row's new ids, [n], DEAD at image positions."""
        kept = self._ids.shape[1]
        self._ids[row] = np.concatenate([self._ids[row], compressed_ids])[-kept:] if kept else self._ids[row]

    def rollback(self, row: int, num_tokens: int) -> None:
        """Forget a row's newest ids; at most `max_rollback` behind the longest the row has been."""
        if num_tokens:
            self._ids[row, num_tokens:] = self._ids[row, :-num_tokens].copy()
            self._ids[row, :num_tokens] = DEAD

    def reset(self, row: int) -> None:
        """Start a row anew."""
        self._ids[row] = DEAD

    def snapshot(self, row: int) -> Ids:
        """A copy of a row's ids, for `restore`."""
        return self._ids[row].copy()

    def restore(self, row: int, ids: Ids) -> None:
        """Set a row to a snapshot, of this row or another: a fork."""
        self._ids[row] = ids
