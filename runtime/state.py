"""Buffers of a session: states that live across steps, and tensors that stages hand to each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.runtime.stage_runners.contract import Backend, Buffer, View


class SessionBuffers:
    """Every tensor of a session, allocated once at its largest size.

    A tensor that a stage both reads and replaces (the streams, the reading mix) has two buffers that change
    places; all others have one.

    Args:
        backend: allocates.
        stages: the chain.
        limits: largest value of every symbol.
    """

    def __init__(self, backend: Backend, stages: Iterable[StageSpec], limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._buffers: dict[str, list[Buffer]] = {}
        self.specs: dict[str, TensorSpec] = {}
        replaced: set[str] = set()
        for stage in stages:
            read = {spec.key for spec in stage.inputs}
            for spec in (*stage.inputs, *stage.outputs):
                if spec.role != "resident":
                    self.specs.setdefault(spec.key, spec)
            replaced |= {spec.key for spec in stage.outputs if spec.alias is None and spec.key in read}
        for key, spec in self.specs.items():
            elements = math.prod(spec.resolve(limits))
            copies = 2 if key in replaced else 1
            self._buffers[key] = [backend.allocate(spec.dtype, elements) for _ in range(copies)]

    def view(self, spec: TensorSpec, sizes: Mapping[str, int], turn: int = 0) -> View:
        """The tensor at the sizes of a step; `turn` picks one of two buffers that change places."""
        buffers = self._buffers[spec.key]
        return buffers[turn % len(buffers)].view(spec.resolve(sizes))

    def fill_if_used(self, key: str, values: Callable[[int], npt.NDArray[Any]]) -> None:
        """Fill a one-dimensional tensor that no step changes, if some stage reads it.

        Args:
            key: the tensor.
            values: its size -> its values.
        """
        for buffer in self._buffers.get(key, []):
            buffer.write(values(buffer.num_elements))

    def state_buffers(self) -> dict[str, Buffer]:
        """The caches by key, e.g. `layers.2.compressed_kv`."""
        return {key: self._buffers[key][0] for key, spec in self.specs.items() if spec.role == "state"}

    def save_row(self, row: int, num_tokens: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of one row of every cache, flat.

        Args:
            row: which.
            num_tokens: tokens that were ever written; of appended caches only their entries are copied.
        """
        return {
            key: buffer.read((buffer.num_elements,))[start : start + used].copy()
            for key, buffer, start, used in self._row_parts(row, num_tokens)
        }

    def load_row(self, row: int, num_tokens: int, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put `save_row`'s copies into a row; ValueError if they are of other caches."""
        parts = list(self._row_parts(row, num_tokens))
        if {key: used for key, _, _, used in parts} != {key: values.size for key, values in saved.items()}:
            raise ValueError("the saved row is of a session with other caches or limits")
        for key, buffer, start, _ in parts:
            buffer.write(saved[key], start)

    def _row_parts(self, row: int, num_tokens: int) -> Iterable[tuple[str, Buffer, int, int]]:
        """(key, buffer, first element, elements in use) of one row of every cache; rows are its first axis."""
        for key, buffer in self.state_buffers().items():
            shape = self.specs[key].resolve(self._limits)
            stride = math.prod(shape[1:])
            entries, symbol = shape[1], self.specs[key].shape[1]
            if isinstance(symbol, str) and symbol.startswith("entries_r"):
                entries = min(entries, num_tokens // int(symbol.removeprefix("entries_r")) + 1)
            yield key, buffer, row * stride, entries * math.prod(shape[2:])

    def num_bytes(self, limits: Mapping[str, int]) -> int:
        """Bytes allocated for all tensors."""
        return sum(self.specs[key].num_bytes(limits) * len(buffers) for key, buffers in self._buffers.items())
