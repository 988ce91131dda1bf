"""The stages of one process, on one device or several."""

from __future__ import annotations

from collections.abc import Mapping

from engram_trt.configs.limits import COMPRESS_RATIOS
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram.staging import EngramStaging
from engram_trt.runtime.execution import (
    CONSTANT_INPUTS,
    BoundChain,
    Place,
    SessionChain,
    bind_chain,
    constant_values,
)
from engram_trt.runtime.stage_runners.contract import Array, Backend
from engram_trt.runtime.state import SessionBuffers


class LocalChain(SessionChain):
    """All stages that this process has. Devices of one back end share memory; others have buffers of their own.

    Args:
        engine: its stages, which may be a part of the chain.
        sizes: largest value of every symbol in this session.
    """

    def __init__(self, engine: Engine, sizes: Mapping[str, int]) -> None:
        self._timeline = engine.timeline
        held: dict[int, SessionBuffers] = {}
        backends: dict[int, Backend] = {id(part.backend): part.backend for part in engine.parts}
        for key, backend in backends.items():
            stages = [r.spec for part in engine.parts if part.backend is backend for r in part.runners]
            held[key] = SessionBuffers(backend, stages, sizes)
        self._held = tuple(held.values())
        self._places = tuple(
            Place(backend=part.backend, runners=part.runners, buffers=held[id(part.backend)], thread=part.thread)
            for part in engine.parts
        )
        self.engram: EngramStaging | None = None
        store = engine.engram_store
        if store is not None and store.fetched_layers:
            placed = [(runner.spec, place.backend) for place in self._places for runner in place.runners]
            self.engram = EngramStaging(store, placed, sizes)
        for buffers in self._held:
            for ratio in COMPRESS_RATIOS:
                buffers.fill_if_used(f"{CONSTANT_INPUTS}_r{ratio}", constant_values)

    @property
    def buffers(self) -> SessionBuffers:
        return self._held[0]

    def bind(self, sizes: Mapping[str, int]) -> BoundChain:
        return bind_chain(self._places, sizes, self.engram, self._timeline)

    def save_row(self, row: int, num_tokens: int) -> dict[str, Array]:
        return {key: value for held in self._held for key, value in held.save_row(row, num_tokens).items()}

    def load_row(self, row: int, num_tokens: int, saved: Mapping[str, Array]) -> None:
        keys = [held.state_buffers().keys() for held in self._held]
        if set().union(*keys) != saved.keys():
            raise ValueError("the saved row is of a session with other caches or limits")
        for own, held in zip(keys, self._held, strict=True):
            held.load_row(row, num_tokens, {key: saved[key] for key in own})

    def dtype(self, key: str) -> str:
        """Of one of the caches."""
        return {name: spec.dtype for held in self._held for name, spec in held.specs.items()}[key]
