"""Taps on intermediate values of the eager modules, for comparisons.

A module names what it computes with `probe("attn_in", x)`. Nothing happens unless a `Recorder` is active, and a
trace never sees one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class Recorder:
    """Collects probed tensors under their full names, e.g. `layers.3.attn_in`."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._prefix = ""

    @contextmanager
    def recording(self, prefix: str = "") -> Iterator[Recorder]:
        """Make this the active recorder; names get `prefix` in front."""
        self._prefix = prefix
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    def add(self, name: str, value: Tensor) -> None:
        """Keep a copy: caches and buffers are updated in place later."""
        self.values[self._prefix + name] = value.detach().clone()


_ACTIVE: ContextVar[Recorder | None] = ContextVar("engram_trt_recorder", default=None)


def is_probing() -> bool:
    """Whether a recorder is active, for values that cost something to compute."""
    return _ACTIVE.get() is not None


def probe(name: str, value: Tensor) -> None:
    """Hand a value to the active recorder, if any."""
    recorder = _ACTIVE.get()
    if recorder is not None:
        recorder.add(name, value)
