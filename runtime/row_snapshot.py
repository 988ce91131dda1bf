"""A sequence outside its session: everything of one row, to be put back later, or beside the original."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_trt.runtime.token_cache import RowIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSnapshot:
    """What a session knows of one row.

    Attributes:
        length: tokens the row has.
        longest: tokens it had at most; bounds its rollback.
        token_ids: its Engram token cache.
        states: cache key -> its values for this row, flat; of appended caches only what was written.
    """

    length: int
    longest: int
    token_ids: RowIds
    states: dict[str, npt.NDArray[np.generic]]
