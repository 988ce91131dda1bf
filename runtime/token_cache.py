"""The Engram token cache: the last compressed ids of every row, kept between steps (spec 2.4).

A hash looks back on max_ngram_size - 1 ids. To go back by a rollback, max_rollback more are kept. What a row's
ids are depends on what was appended and taken back, never on how it was cut into chunks, nor on padding (which
is not appended), other rows, or an earlier use of the row. Image positions are appended as DEAD, so a span that
crosses a border of chunks blocks the look-back on both sides of it. A step that is aborted leaves the cache as
it was if it worked on a `copy`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_trt.plugins.engram_hash.spec import DEAD

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIds:
    """A row of the cache outside of it.

    Attributes:
        ids: int64 [history + max_rollback], oldest first; read-only.
        num_known: how many of the newest were not lost to a rollback.
    """

    ids: Ids
    num_known: int


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
        # Before a sequence begins all ids are DEAD, and known to be.
        self._num_known: Ids = np.full(max_batch, history + max_rollback, dtype=np.int64)

    def copy(self) -> TokenCache:
        """An independent cache with the same contents: a step works on it, and drops it when it is aborted."""
        other = TokenCache(0, self.history, 0)
        other._ids, other._num_known = self._ids.copy(), self._num_known.copy()
        return other

    def recent(self, num_rows: int) -> Ids:
        """The look-back of rows 0..num_rows-1: [num_rows, history], oldest first, DEAD where nothing was."""
        return self._ids[:num_rows, self._ids.shape[1] - self.history :]

    def append(self, row: int, compressed_ids: Ids) -> None:
        """Add a row's new ids, [n], DEAD at image positions, without padding."""
        kept = self._ids.shape[1]
        if not kept:
            return
        self._ids[row] = np.concatenate([self._ids[row], compressed_ids])[-kept:]
        self._num_known[row] = min(kept, self._num_known[row] + len(compressed_ids))

    def rollback(self, row: int, num_tokens: int) -> None:
        """Forget a row's newest ids; at most `max_rollback` behind the longest the row has been.

        Raises:
            ValueError: more than that; the ids before them are gone.
        """
        left = int(self._num_known[row]) - num_tokens
        if num_tokens < 0 or (self.history and left < self.history):
            most = int(self._num_known[row]) - self.history
            raise ValueError(f"row {row}: cannot take back {num_tokens} ids; at most {most} are kept for that")
        if num_tokens and self.history:
            self._ids[row, num_tokens:] = self._ids[row, :-num_tokens].copy()
            self._ids[row, :num_tokens] = DEAD
            self._num_known[row] = left

    def reset(self, row: int) -> None:
        """Start a row anew, for a new sequence in an old place."""
        self._ids[row] = DEAD
        self._num_known[row] = self._ids.shape[1]

    def snapshot(self, row: int) -> RowIds:
        """A row's ids, for `restore`; later changes of the row do not reach it."""
        ids = self._ids[row].copy()
        ids.setflags(write=False)
        return RowIds(ids=ids, num_known=int(self._num_known[row]))

    def restore(self, row: int, saved: RowIds) -> None:
        """Set a row to a snapshot of this row or another; ValueError for one of a cache of another size."""
        if saved.ids.shape != self._ids[row].shape:
            raise ValueError(f"a snapshot of {saved.ids.shape[0]} ids for rows of {self._ids.shape[1]}")
        self._ids[row] = saved.ids
        self._num_known[row] = saved.num_known

    def fork(self, source: int, target: int) -> None:
        """Continue a sequence in another row as well; the two are independent from then on."""
        self._ids[target] = self._ids[source]
        self._num_known[target] = self._num_known[source]
