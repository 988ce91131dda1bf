"""What a comparison found: differences with their place and cause, and how close everything else came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from engram_trt.export.accuracy.divergence.deviation import Coordinate, Deviation
from engram_trt.export.accuracy.divergence.limits import Limit

Cause = Literal["own", "came in", "input", "unknown"]
"""The stage's own computation (it differs on the reference's inputs as well); differences of its inputs that are
within their limits and grew in it; an input that the session supplies; not tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionChange:
    """What one token chose on either side.

    Args:
        name: `topk_indices`, `candidate_blocks` or `experts`.
        row, position: of the token.
        only_reference, only_found: chosen by one side alone.
    """

    name: str
    row: int
    position: int
    only_reference: tuple[int, ...]
    only_found: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFinding:
    """Where inside a stage the sides part, on equal inputs of the stage.

    Args:
        op: an op of the package, a linear or a norm (`SparseAttention`, `attn.wq_b`), or the arithmetic between
            such (`between SparseAttention and attn.wo_b`).
        tensor: the first value out of its limit.
        error: relative to the root mean square, or number of differing elements.
        note: how it was seen.
    """

    op: str
    tensor: str
    error: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One tensor out of its limit.

    Args:
        level: chain, stage, op or tokens.
        backend: whose values were compared with the reference's.
        stage, tensor: where; `session` for what the runtime feeds.
        step: of the comparison, counted over all groups of rows; -1 where there are no steps.
        kind: of the deviation.
        error, limit: worst error and what was accepted.
        num_wrong, num_tokens: tokens out of the limit, tokens compared.
        cause: see `Cause`.
        worst: elements with both values.
        selections: tokens that chose differently.
        point: where inside the stage, after a bisection.
        also: other tensors of the stage that are out of their limit in the same step.
        inputs: empty for inputs as in use, else the variant (see `edges.py`).
    """

    level: str
    backend: str
    stage: str
    tensor: str
    step: int = -1
    kind: str = "value"
    error: float
    limit: Limit
    num_wrong: int
    num_tokens: int
    cause: Cause = "unknown"
    worst: tuple[Coordinate, ...] = ()
    selections: tuple[SelectionChange, ...] = ()
    point: PointFinding | None = None
    also: tuple[str, ...] = ()
    inputs: str = ""


@dataclass(slots=True)
class Track:
    """How close one tensor came over all steps.

    Attributes:
        limit: what was accepted.
        worst: largest error of a token that was not excused as a tie.
        compared: tokens.
        wrong: tokens out of the limit.
        by_position: position -> largest error; grows as needed.
    """

    limit: Limit
    worst: float = 0.0
    compared: int = 0
    wrong: int = 0
    by_position: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(
        self, found: Deviation, wrong: npt.NDArray[np.bool_], excused: npt.NDArray[np.bool_], positions: Sequence[int]
    ) -> None:
        """Count a step's tokens; an excused one counts as compared and has no error."""
        errors = np.where(excused, 0.0, found.errors)
        self.worst = max(self.worst, float(errors.max(initial=0.0)))
        self.compared += len(errors)
        self.wrong += int(wrong.sum())
        where = np.asarray(positions)
        if where.size and int(where.max()) >= self.by_position.size:
            self.by_position = np.pad(self.by_position, (0, int(where.max()) + 1 - self.by_position.size))
        if where.size:
            np.maximum.at(self.by_position, where, errors)


@dataclass(slots=True)
class Agreement:
    """How often both sides chose the same.

    Attributes:
        same, compared: tokens.
        tied: of the others, those that are ties.
    """

    same: int = 0
    compared: int = 0
    tied: int = 0


@dataclass(slots=True)
class Outcome:
    """Everything one back end's comparison found.

    Attributes:
        level, backend, reference: what was compared.
        findings: differences; the first one is the first divergence.
        tracks: `stage.tensor` -> how close it came.
        agreements: `stage.list` -> agreement; experts as `stage.experts`.
        ties: tokens excused because a choice was a tie, by stage.
        steps, tokens: how much was compared.
        token_scores: of level tokens (see `tokens.TokenScores.summary`).
        notes: what was not compared, and why.
    """

    level: str
    backend: str
    reference: str
    findings: list[Finding] = field(default_factory=list)
    tracks: dict[str, Track] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    ties: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    token_scores: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings
