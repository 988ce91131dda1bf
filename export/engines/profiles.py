"""Optimisation profiles: which extents a plan takes, from the deployment's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec

Range = tuple[int, int, int]
"""Smallest, typical and largest value of a symbol."""

Profile = Mapping[str, Range]

DECODE, PREFILL = "decode", "prefill"

STEP_SYMBOLS = ("batch", "tokens", "selected")
"""Symbols that vary from step to step besides the visible entries; caches are bound at one size."""


def stage_profiles(
    spec: StageSpec, config: ModelConfig, limits: Limits, table_rows: Iterable[int] = ()
) -> dict[str, Profile]:
    """The profiles of a stage: one token per row, and any number of them.

    Args:
        spec: names the symbols.
        config: the model.
        limits: of the deployment.
        table_rows: rows of the Engram tables of all stages that share the plan.

    Returns:
        name -> range of every symbol in the stage's inputs; without `prefill` where steps have one token anyway.
    """
    largest = symbol_limits(config, limits)
    rows = sorted(table_rows)

    def profile(tokens: Range, batch: Range) -> Profile:
        ranges: dict[str, Range] = {}
        for symbol in sorted({extent for tensor in spec.inputs for extent in tensor.shape if isinstance(extent, str)}):
            if symbol == "table_rows":
                ranges[symbol] = (rows[0], rows[-1], rows[-1])
            elif symbol == EXPERTS:
                ranges[symbol] = (1, config.n_routed_experts, config.n_routed_experts)
            elif symbol == "batch":
                ranges[symbol] = batch
            elif symbol in STEP_SYMBOLS:
                ranges[symbol] = tokens
            elif symbol.startswith("visible"):
                ranges[symbol] = (1, max(1, largest[symbol] // 2), largest[symbol])
            else:
                ranges[symbol] = (largest[symbol],) * 3
        return ranges

    most, rows_of_batch = limits.max_step_tokens, limits.max_batch
    found = {DECODE: profile((1, 1, 1), (1, rows_of_batch, rows_of_batch))}
    if most > 1:
        found[PREFILL] = profile((1, most, most), (1, 1, rows_of_batch))
    return found


def shapes_under(profile: Profile, shape: Iterable[str | int]) -> tuple[tuple[int, ...], ...]:
    """Smallest, typical and largest shape of a tensor."""
    extents = tuple(shape)
    return tuple(
        tuple(profile[extent][which] if isinstance(extent, str) else extent for extent in extents) for which in range(3)
    )
