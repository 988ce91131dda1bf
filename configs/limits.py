"""How large every symbolic extent can get under a deployment's limits."""

from __future__ import annotations

from dataclasses import dataclass

from engram_trt.configs.model import ModelConfig

COMPRESS_RATIOS = (1, 2)
"""Tokens per compressed entry that a model may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an operator allows.

    Args:
        max_batch: rows of a session.
        max_step_tokens: tokens per row in one step.
        max_context: tokens per row, prompt and answer.
        max_rollback: tokens by which a row may fall back behind the longest it has been.
    """

    max_batch: int = 1
    max_step_tokens: int = 128
    max_context: int = 4096
    max_rollback: int = 8


def symbol_limits(config: ModelConfig, limits: Limits) -> dict[str, int]:
    """Largest value of every symbol in a stage's shapes.

    A ring must hold, besides what a token looks back on, everything a step and a rollback may have written
    ahead of it: a step writes all its rows, padding included, before it reads. Appended caches need room for
    the padding of a step that starts at the last position, and for the incomplete entry after it.
    """
    ahead = limits.max_step_tokens + limits.max_rollback
    sizes = {
        "batch": limits.max_batch,
        "tokens": limits.max_step_tokens,
        "selected": limits.max_step_tokens,
        "window_ring": config.window_size + ahead,
        "state_ring": max(COMPRESS_RATIOS) + ahead,
    }
    for ratio in COMPRESS_RATIOS:
        entries = (limits.max_context + limits.max_step_tokens) // ratio + 1
        sizes[f"entries_r{ratio}"] = entries
        sizes[f"visible_r{ratio}"] = entries
    return sizes
