"""Which elements of a stage's tensors stand for real tokens, and at which position.

Padding, slots never written and ring slots that no token looks back on are left out of every comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import TensorSpec
from engram_trt.export.accuracy.divergence.stepping import OpenStep
from engram_trt.runtime.stage_runners.contract import Array

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Elements along the first two axes of a tensor.

    Args:
        rows: int64 [n], first index.
        slots: int64 [n], second index: token of the step, cache slot, or selected token.
        positions: int64 [n], position of the token (the first one of a compressed entry) in its row.
    """

    rows: Ids
    slots: Ids
    positions: Ids

    def of(self, values: Array) -> Array:
        """[batch, slots, ...] -> [n, ...]."""
        return values[self.rows, self.slots]

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Places:
        """Some of the elements; mask is bool [n]."""
        return Places(rows=self.rows[mask], slots=self.slots[mask], positions=self.positions[mask])


class StepPlaces:
    """Places of every tensor of one step; shared by all layers.

    Args:
        config: the model.
        starts, counts: row -> first position and number of its tokens in the step.
        logits: which tokens the head computes.
        written_only: of a cache, take the places that the step wrote instead of all that are live.
    """

    def __init__(
        self,
        config: ModelConfig,
        starts: Mapping[int, int],
        counts: Mapping[int, int],
        logits: str = "last",
        *,
        written_only: bool = False,
    ) -> None:
        self._written_only = written_only
        self._config, self._starts, self._counts = config, dict(starts), dict(counts)
        self._caches: dict[tuple[str, int, int], Places] = {}
        rows = [np.full(count, row) for row, count in self._counts.items()]
        slots = [np.arange(count) for count in self._counts.values()]
        begin = [np.full(count, self._starts[row]) for row, count in self._counts.items()]
        joined = [np.concatenate(parts).astype(np.int64) for parts in (rows, slots, begin)]
        self.tokens = Places(rows=joined[0], slots=joined[1], positions=joined[2] + joined[1])
        self.selected = self.tokens if logits == "all" else self._last()

    @classmethod
    def of(cls, step: OpenStep, config: ModelConfig, logits: str = "last", *, written_only: bool = False) -> StepPlaces:
        """Places of an open step."""
        return cls(config, step.starts, step.counts, logits, written_only=written_only)

    def places(self, spec: TensorSpec, shape: tuple[int, ...]) -> Places:
        """Places of a stage's output of the given shape."""
        if spec.role == "state":
            return self._cache(spec, shape[1])
        return self.selected if "selected" in spec.shape else self.tokens

    def _last(self) -> Places:
        rows = np.array(list(self._counts), dtype=np.int64)
        ends = np.array([self._starts[row] + count for row, count in self._counts.items()], dtype=np.int64)
        return Places(rows=rows, slots=np.zeros_like(rows), positions=ends - 1)

    def _cache(self, spec: TensorSpec, capacity: int) -> Places:
        """Live slots of a cache after the step."""
        ratio = max(self._config.layer(spec.owner or 0).compress_ratio, 1)
        key = (spec.tensor, ratio, capacity)
        if key not in self._caches:
            parts = [self._live(spec.tensor, ratio, capacity, row) for row in self._counts]
            rows, slots, positions = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._caches[key] = Places(rows=rows, slots=slots, positions=positions)
        return self._caches[key]

    def _live(self, tensor: str, ratio: int, capacity: int, row: int) -> tuple[Ids, Ids, Ids]:
        start = self._starts[row] if self._written_only else 0
        end = self._starts[row] + self._counts[row]
        if tensor in ("compressed_kv", "index_keys"):
            slots = np.arange(start // ratio, end // ratio, dtype=np.int64)
            positions = slots * ratio
        else:
            back = self._config.window_size if tensor == "window_kv" else ratio
            positions = np.arange(max(end - back, start), end, dtype=np.int64)
            slots = positions % capacity
        return np.full(slots.shape, row, dtype=np.int64), slots, positions
