"""The outputs of one stage in one step, both sides, in the order the stage makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.accuracy.divergence.deviation import Deviation, deviation
from engram_trt.export.accuracy.divergence.findings import SelectionChange
from engram_trt.export.accuracy.divergence.limits import Limit
from engram_trt.export.accuracy.divergence.places import Places, StepPlaces
from engram_trt.runtime.stage_runners.contract import Array

CAUSAL_ORDER = (
    "dspark_tap",
    "window_kv",
    "kv_state",
    "score_state",
    "index_keys",
    "compressed_kv",
    "candidate_blocks",
    "topk_indices",
)
"""In which order a block makes its outputs; the streams come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One output of one stage in one step."""

    spec: TensorSpec
    limit: Limit
    places: Places
    reference: Array
    found: Array
    deviation: Deviation


FLIPPED_SHARE, FLIPPED_TOKENS = 0.25, 4
"""Where values are rounded to FP8 or FP4, a few tokens differ because a rounding flipped; a fault changes more."""


def without_flips(found: Deviation) -> Deviation:
    """A deviation of a model that rounds: none, unless more tokens are out than flipped roundings explain."""
    wrong = int(found.wrong.sum())
    many = wrong >= FLIPPED_TOKENS and wrong > FLIPPED_SHARE * len(found.wrong)
    return found if many or found.kind in ("not finite", "shape") else replace(found, wrong=np.zeros_like(found.wrong))


def compare_output(
    spec: TensorSpec, first: Array, second: Array, places: StepPlaces, limit: Limit, rounding: bool
) -> Compared:
    """Hold one output of a stage against the reference's, real tokens only; `rounding` as in `Limits`."""
    where = places.places(spec, first.shape)
    values = where.of(first), where.of(second)
    return Compared(
        spec=spec,
        limit=limit,
        places=where,
        reference=values[0],
        found=values[1],
        deviation=without_flips(deviation(*values, limit)) if rounding else deviation(*values, limit),
    )


def in_causal_order(stage: StageSpec) -> list[TensorSpec]:
    """A stage's outputs as one leads to the next."""
    return sorted(stage.outputs, key=_causal_order)


def _causal_order(spec: TensorSpec) -> int:
    return CAUSAL_ORDER.index(spec.tensor) if spec.tensor in CAUSAL_ORDER else len(CAUSAL_ORDER)


def selection_changes(item: Compared, count: int = 3) -> list[SelectionChange]:
    """The first tokens whose lists differ, with what only one side chose."""
    changes = []
    for token in np.flatnonzero(item.deviation.wrong)[:count]:
        left, right = set(item.reference[token].tolist()), set(item.found[token].tolist())
        changes.append(
            SelectionChange(
                name=item.spec.name,
                row=int(item.places.rows[token]),
                position=int(item.places.positions[token]),
                only_reference=tuple(sorted(left - right)),
                only_found=tuple(sorted(right - left)),
            )
        )
    return changes
