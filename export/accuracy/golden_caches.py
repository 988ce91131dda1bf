"""Caches after a number of tokens, position by position: only slots that are live."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_results import Vectors
from engram_trt.export.accuracy.golden_tolerance import STREAMS
from engram_trt.runtime.session import Session

_STATE_OF = {
    "window_kv_cache": "window_kv",
    "compress_kv_cache": "compressed_kv",
    "index_k_cache": "index_keys",
    "kv_state": "kv_state",
    "score_state": "score_state",
}
MOMENTS = ("after_prefill", "end")


def live_slots(config: ModelConfig, layer: int, cache: str, length: int) -> tuple[list[int], int]:
    """What a cache holds after `length` tokens.

    Args:
        config: the model.
        layer: owner.
        cache: golden name.
        length: tokens the row has.

    Returns:
        positions (entries, for a compressed cache) that are live, and the golden ring's size, 0 for none.
    """
    ratio = config.layer(layer).compress_ratio
    if cache == "window_kv_cache":
        return list(range(max(length - config.window_size, 0), length)), config.window_size
    if cache in ("compress_kv_cache", "index_k_cache"):
        return list(range(length // ratio)), 0
    return list(range(length // ratio * ratio, length)), ratio


def compare_caches(vectors: Vectors, session: Session, batch: int, moment: str, length: int) -> None:
    """Compare all caches of one moment.

    Args:
        vectors: a model's `caches` file.
        session: every row has `length` tokens.
        batch: rows.
        moment: prefix of the tensors: `after_prefill` or `end`.
        length: tokens of each row.
    """
    config, limits = session.engine.config, session.engine.symbol_limits
    buffers = session.buffers.state_buffers()
    for name in vectors.names:
        match = re.fullmatch(rf"{moment}\.layers\.(\d+)\.(\w+)", name)
        if match is None or match[2] not in _STATE_OF:
            continue
        layer, cache = int(match[1]), match[2]
        key = f"layers.{layer}.{_STATE_OF[cache]}"
        if key not in buffers:
            continue
        shape = session.buffers.specs[key].resolve({**limits, "batch": batch})
        stored = torch.from_numpy(buffers[key].read(shape).copy())
        positions, golden_ring = live_slots(config, layer, cache, length)
        ring = shape[1] if golden_ring else 0
        got = stored[:, _slots(positions, ring)]
        want = vectors.input(name)[:, _slots(positions, golden_ring)]
        vectors.check(name, got, STREAMS, moment.replace("_", " "), want=want)


def _slots(positions: list[int], ring: int) -> Tensor:
    return torch.tensor([position % ring if ring else position for position in positions], dtype=torch.int64)
