"""Bytes that a session allocates, counted by the runtime's own allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import ITEM_BYTES, StageSpec
from engram_trt.runtime.stage_runners.contract import Array, Backend, Buffer, StageRunner, View
from engram_trt.runtime.state import SessionBuffers

FP8_GROUP = FP4_GROUP = 32
KV_GROUP = 16


class _CountedBuffer(Buffer):
    """Memory that is counted and not there."""

    def write(self, values: Array, offset: int = 0) -> None:
        raise NotImplementedError

    def read(self, shape: tuple[int, ...]) -> Array:
        raise NotImplementedError


class _CountingBackend(Backend):
    name = "counting"

    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        return _CountedBuffer(dtype, num_elements)

    def load(self, spec: StageSpec) -> StageRunner:
        raise NotImplementedError

    def resident(self, spec: StageSpec, binding: str) -> View:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBytes:
    """Allocated by one session: caches, and tensors that stages hand to each other or the session fills."""

    caches: int
    activations: int


def session_bytes(stages: Sequence[StageSpec], limits: Mapping[str, int]) -> SessionBytes:
    """What `SessionBuffers` allocates for some stages.

    Args:
        stages: of one device.
        limits: largest value of every symbol.
    """
    buffers = SessionBuffers(_CountingBackend(), stages, limits)
    caches = sum(buffer.num_elements * ITEM_BYTES[buffer.dtype] for buffer in buffers.state_buffers().values())
    return SessionBytes(caches=caches, activations=buffers.num_bytes(limits) - caches)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRates:
    """Growth of the caches per token of one sequence.

    Attributes:
        packed: in the published number formats (spec 5.7): FP4 rows with a scale per 16, index keys per 32.
        allocated: in the stages' dtype, which is what this runtime holds.
        packed_window_slot: one slot of a layer's window ring: FP8 with a scale per 32.
        allocated_window_slot: the same in the stages' dtype.
    """

    packed: int
    allocated: int
    packed_window_slot: int
    allocated_window_slot: int


def cache_rates(config: ModelConfig, dtype: str) -> CacheRates:
    """Bytes per token; entries of ratio 2 count half."""
    head, index = config.head_dim, config.index_head_dim
    packed_entry = head // 2 + head // KV_GROUP + index // 2 + index // FP4_GROUP
    entry = (head + index) * ITEM_BYTES[dtype]
    ratios = [config.compress_ratios[layer_id] for layer_id in config.kv_source_layers]
    return CacheRates(
        packed=sum(packed_entry * 2 // ratio for ratio in ratios) // 2,
        allocated=sum(entry * 2 // ratio for ratio in ratios) // 2,
        packed_window_slot=head + head // FP8_GROUP,
        allocated_window_slot=head * ITEM_BYTES[dtype],
    )
