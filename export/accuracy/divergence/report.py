"""A comparison as JSON (`compare_report.schema.json`) and as an exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.divergence.deviation import Coordinate
from engram_trt.export.accuracy.divergence.findings import Finding, Outcome, SelectionChange, Track
from engram_trt.export.accuracy.divergence.limits import Limit, Limits

SCHEMA = 1
SCHEMA_FILE = Path(__file__).resolve().parents[2] / "data" / "compare_report.schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Everything a run of `engram-trt compare ARTIFACT` found.

    Args:
        artifact: its folder.
        digest: of the artefact.
        prompts_from: where the prompts come from.
        prompts_digest: of their ids.
        num_prompts: how many.
        limits: what was accepted.
        config: the model; layers of the plots.
        outcomes: one per back end.
    """

    artifact: str
    digest: str
    prompts_from: str
    prompts_digest: str
    num_prompts: int
    limits: Limits
    config: ModelConfig
    outcomes: tuple[Outcome, ...]

    @property
    def exit_code(self) -> int:
        """1 if anything differs, else 0."""
        return 0 if all(outcome.ok for outcome in self.outcomes) else 1

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; a number that is infinite or no number is a string: "inf", "-inf", "nan"."""
        return {
            "schema": SCHEMA,
            "artifact": self.artifact,
            "artifact_sha256": self.digest,
            "prompts": {"source": self.prompts_from, "sha256": self.prompts_digest, "count": self.num_prompts},
            "limits": {"measured": len(self.limits.measured), "rounding": self.limits.rounding, "tie": self.limits.tie},
            "exit_code": self.exit_code,
            "outcomes": [_outcome(outcome) for outcome in self.outcomes],
        }


def number(value: float) -> float | str:
    """A float as JSON can hold it."""
    if math.isnan(value):
        return "nan"
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "backend": outcome.backend,
        "reference": outcome.reference,
        "level": outcome.level,
        "verdict": "agree" if outcome.ok else "differ",
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "first_divergence": _finding(outcome.findings[0]) if outcome.findings else None,
        "findings": [_finding(finding) for finding in outcome.findings],
        "tensors": {key: _track(track) for key, track in outcome.tracks.items()},
        "agreement": {
            key: {"same": item.same, "tied": item.tied, "compared": item.compared}
            for key, item in outcome.agreements.items()
        },
        "ties": dict(outcome.ties),
        "token_scores": {key: number(value) for key, value in outcome.token_scores.items()},
        "notes": list(outcome.notes),
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {"value": limit.value, "origin": limit.origin}


def _finding(finding: Finding) -> dict[str, Any]:
    point = finding.point
    return {
        "stage": finding.stage,
        "tensor": finding.tensor,
        "step": finding.step,
        "kind": finding.kind,
        "error": number(finding.error),
        "limit": _limit(finding.limit),
        "num_wrong": finding.num_wrong,
        "num_tokens": finding.num_tokens,
        "cause": finding.cause,
        "inputs": finding.inputs or "as in use",
        "worst": [_coordinate(item) for item in finding.worst],
        "selections": [_selection(item) for item in finding.selections],
        "also": list(finding.also),
        "op": None
        if point is None
        else {"name": point.op, "tensor": point.tensor, "error": number(point.error), "note": point.note},
    }


def _coordinate(item: Coordinate) -> dict[str, Any]:
    return {
        "row": item.row,
        "position": item.position,
        "index": list(item.index),
        "reference": number(item.reference),
        "found": number(item.found),
    }


def _selection(item: SelectionChange) -> dict[str, Any]:
    return {
        "name": item.name,
        "row": item.row,
        "position": item.position,
        "only_reference": list(item.only_reference),
        "only_found": list(item.only_found),
    }


def _track(track: Track) -> dict[str, Any]:
    return {
        "limit": _limit(track.limit),
        "worst": number(track.worst),
        "compared": track.compared,
        "wrong": track.wrong,
        "by_position": [number(float(value)) for value in np.round(track.by_position, 12)],
    }


def by_stage(tracks: Mapping[str, Track]) -> dict[str, tuple[str, Track]]:
    """Stage -> the tensor that came closest to (or furthest over) its limit, and its track."""
    worst: dict[str, tuple[str, Track]] = {}
    for key, track in tracks.items():
        stage, _, tensor = key.partition(".")
        known = worst.get(stage)
        if known is None or _share(track) > _share(known[1]):
            worst[stage] = (tensor, track)
    return worst


def _share(track: Track) -> float:
    """Error as a share of the limit."""
    if track.limit.value:
        return track.worst / track.limit.value
    return math.inf if track.worst else 0.0
