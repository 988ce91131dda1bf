"""What is accepted: one limit per tensor, measured where a calibration was run, set by hand otherwise.

Floats are held to a largest |difference| relative to the root mean square of the reference's tensor in that step; ids,
maps and lists are exact (lists up to ties, see `ties.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from engram_trt.configs.tensors import TensorSpec

Origin = Literal["exact", "measured", "hand-set"]

HAND_SET: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""By dtype of the tensor. float32: about ten times what another reduction order does to the `tiny` model (1.8e-5 in
the last layer); bfloat16: about ten roundings (2^-8 each) on top of each other. Neither was tuned to a back end."""

HAND_SET_ALONE: Mapping[str, float] = {"float32": 3e-5, "bfloat16": 3e-2}
"""The same for one stage on equal inputs, where nothing adds up (`tiny`: 3e-6)."""

HAND_SET_ROUNDING = 2e-2
"""Where activations or caches are rounded to FP8 or FP4; what a few flipped roundings do is set aside beforehand (see
`outputs.without_flips`)."""

TIE = 1e-4
"""Scores closer than this, relative to the root mean square of the scores, may be chosen in either order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What is accepted for one tensor.

    Args:
        value: largest error relative to the root mean square; 0 for exact.
        origin: where the value comes from.
    """

    value: float
    origin: Origin

    def __str__(self) -> str:
        return "exact" if self.origin == "exact" else f"{self.value:.1e}{'' if self.origin == 'measured' else '*'}"


EXACT = Limit(value=0.0, origin="exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a comparison.

    Args:
        rounding: the artefact rounds activations or caches.
        measured: `stage.tensor` -> limit of a calibration.
        tie: see `TIE`.
    """

    rounding: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)
    tie: float = TIE

    def of(self, stage: str, spec: TensorSpec) -> Limit:
        """The limit of a stage's tensor."""
        if spec.dtype not in HAND_SET:
            return EXACT
        found = self.measured.get(f"{stage}.{spec.name}")
        if found is not None:
            return Limit(value=found, origin="measured")
        return Limit(value=HAND_SET_ROUNDING if self.rounding else HAND_SET[spec.dtype], origin="hand-set")

    def alone(self, stage: str, spec: TensorSpec) -> Limit:
        """The limit of a stage's output on equal inputs that a text does not bring about.

        A calibration did not see them, so what it measured only raises the hand-set limit.
        """
        if spec.dtype not in HAND_SET_ALONE:
            return EXACT
        value = HAND_SET_ROUNDING if self.rounding else HAND_SET_ALONE[spec.dtype]
        return Limit(value=max(value, self.measured.get(f"{stage}.{spec.name}", 0.0)), origin="hand-set")

    def inside(self, values: npt.NDArray[Any]) -> Limit:
        """The limit of a tensor inside a stage, on equal inputs."""
        if values.dtype.kind != "f":
            return EXACT
        return Limit(value=max(HAND_SET["float32"], HAND_SET_ROUNDING if self.rounding else 0.0), origin="hand-set")
