"""The published code's stale index keys in decode (spec 10.1), for the eager modules alone.

One place in the published model holds "the current index keys". An owner of entries puts its own keys there when a
step completes an entry; a step that leaves a group of two open leaves the place as it is, and the layer then scores its
queries against the keys of whatever layer came last. Nothing is affected while every entry is selected. This switch
reproduces it, to explain differences to somebody who compares with the published code; no other back end has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engram_trt.configs.errors import RequestError
from engram_trt.export.modeling.indexer import Indexer
from engram_trt.runtime.engine import Engine


class _Place:
    """The one place, per row of the session."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}

    def before(self, indexer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A pre-hook of an indexer: publish its keys where the step completed an entry, score what is published."""
        if not isinstance(indexer, Indexer):
            raise TypeError("a hook of an indexer only")
        attn_in, q_latent, table, keys, starts, visible, candidates = arguments
        ratio, tokens, width = indexer.layer.compress_ratio, attn_in.shape[1], visible.shape[0]
        rows = []
        for row, start in enumerate(starts.tolist()):
            complete = (start + tokens) // ratio > start // ratio
            if indexer.layer.is_kv_source and complete:
                self._keys[row] = keys
            rows.append(self._keys.get(row, keys)[row, :width])
        return attn_in, q_latent, table, torch.stack(rows), starts, visible, candidates


@contextmanager
def stale_index_keys(engine: Engine) -> Iterator[None]:
    """Compute as the published code does while the block runs.

    Args:
        engine: of the eager modules; all rows of its session advance one token a step behind their prompts.

    Raises:
        RequestError: it is of another back end.
    """
    modules = [getattr(getattr(runner, "inner", runner), "module", None) for runner in engine.runners]
    indexers = [
        item for module in modules if module is not None for item in module.modules() if isinstance(item, Indexer)
    ]
    if engine.backend.name != "torch":
        raise RequestError(
            "stale index keys",
            found=f"back end {engine.backend.name}",
            expected="torch: no other back end reproduces this",
            remedy="Compare with --reference torch.",
        )
    place = _Place()
    handles = [indexer.register_forward_pre_hook(place.before) for indexer in indexers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
