"""How far two tensors are apart, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engram_trt.export.accuracy.divergence.limits import Limit
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.runtime.stage_runners.contract import Array

Kind = Literal["value", "exact", "not finite", "shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """One element and what each side has there.

    Args:
        row: of the session.
        position: of the token in its row; of an entry, its first token.
        index: of the element within the token.
        reference, found: both values; NaN and infinities as they are.
    """

    row: int
    position: int
    index: tuple[int, ...]
    reference: float
    found: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Two tensors compared.

    Args:
        kind: what the error counts: a difference relative to the root mean square; differing elements; elements
            that are no number.
        errors: float64 [n], of each token; infinite where a value is not finite.
        wrong: bool [n], out of the limit.
    """

    kind: Kind
    errors: npt.NDArray[np.float64]
    wrong: npt.NDArray[np.bool_]

    @property
    def worst(self) -> float:
        return float(self.errors.max(initial=0.0))


def deviation(reference: Array, found: Array, limit: Limit) -> Deviation:
    """Compare tokens.

    Args:
        reference, found: [n, ...].
        limit: what is accepted for each token.
    """
    tokens = reference.shape[0]
    if reference.shape != found.shape:
        return Deviation(kind="shape", errors=np.full(tokens, np.inf), wrong=np.ones(tokens, dtype=np.bool_))
    width = math.prod(reference.shape[1:])
    if reference.dtype.kind != "f":
        differing = (reference != found).reshape(tokens, width).sum(axis=1)
        return Deviation(kind="exact", errors=differing.astype(np.float64), wrong=differing > 0)
    first, second = reference.reshape(tokens, width), found.reshape(tokens, width)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(second - first)
        largest = difference.max(axis=1, initial=0.0).astype(np.float64)
    if not np.isfinite(largest).all():
        return _not_finite(first, second, limit)
    errors = largest / root_mean_square(first)
    return Deviation(kind="value", errors=errors, wrong=errors > limit.value)


def _not_finite(first: Array, second: Array, limit: Limit) -> Deviation:
    """NaN or an infinity on either side is a difference, also where both sides have it."""
    finite = np.isfinite(first) & np.isfinite(second)
    bad = ~finite.all(axis=1)
    clean = np.where(finite, first, 0.0)
    largest = np.abs(np.where(finite, second, 0.0) - clean).max(axis=1, initial=0.0).astype(np.float64)
    errors = largest / root_mean_square(clean)
    errors[bad] = np.inf
    return Deviation(kind="not finite", errors=errors, wrong=bad | (errors > limit.value))


def root_mean_square(values: Array) -> float:
    """Scale of a tensor; 1 for one of zeros, so that an error in it counts as it is."""
    mean = float(np.square(values, dtype=np.float64).mean()) if values.size else 0.0
    return mean**0.5 or 1.0


def worst_coordinates(
    reference: Array, found: Array, places: Places, chosen: npt.NDArray[np.bool_], count: int = 3
) -> tuple[Coordinate, ...]:
    """The elements that differ most among the chosen tokens, the worst first; one per token.

    Args:
        reference, found: [n, ...] as compared.
        places: of the tokens.
        chosen: bool [n].
        count: how many.
    """
    tokens = np.flatnonzero(chosen)
    if reference.shape != found.shape or not tokens.size:
        return ()
    shape = reference.shape[1:]
    first = reference[tokens].reshape(len(tokens), -1).astype(np.float64)
    second = found[tokens].reshape(len(tokens), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(second - first)
    difference = np.where(np.isfinite(first) & np.isfinite(second), difference, np.inf)
    elements = difference.argmax(axis=1)
    sizes = difference[np.arange(len(tokens)), elements]
    return tuple(
        Coordinate(
            row=int(places.rows[tokens[item]]),
            position=int(places.positions[tokens[item]]),
            index=tuple(int(i) for i in np.unravel_index(int(elements[item]), shape)) if shape else (),
            reference=float(first[item, elements[item]]),
            found=float(second[item, elements[item]]),
        )
        for item in np.argsort(-sizes, kind="stable")[:count]
    )
