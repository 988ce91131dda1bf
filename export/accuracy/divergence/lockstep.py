"""Two chains side by side: the same tokens, stage after stage, every output and every cache compared at once.

After a difference the candidate gets the reference's values, so that each later stage is judged by itself and a
choice that may go either way does not count as an error of all that follows. Nothing is kept beyond a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from engram_trt.export.accuracy.divergence.deviation import deviation, worst_coordinates
from engram_trt.export.accuracy.divergence.edges import edges
from engram_trt.export.accuracy.divergence.findings import (
    Agreement,
    Cause,
    Finding,
    Outcome,
    Track,
)
from engram_trt.export.accuracy.divergence.gates import gate_agreement
from engram_trt.export.accuracy.divergence.limits import EXACT, Limits
from engram_trt.export.accuracy.divergence.outputs import (
    Compared,
    compare_output,
    in_causal_order,
    selection_changes,
)
from engram_trt.export.accuracy.divergence.places import Places, StepPlaces
from engram_trt.export.accuracy.divergence.rerun import rerun_stage
from engram_trt.export.accuracy.divergence.stepping import (
    RESIDENT_LIKE,
    OpenStep,
    StageCall,
    SteppedSession,
    hand_over,
)
from engram_trt.export.accuracy.divergence.ties import SCORES_OF, Choices, Explainer, inputs_for_eager
from engram_trt.runtime.session import Logits, Tokens
from engram_trt.runtime.stage_runners.contract import Array

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A finding together with what a bisection needs: the stage on both sides, and the reference's inputs."""

    finding: Finding
    reference: StageCall
    candidate: StageCall
    feed: Mapping[str, Array]
    engram_ids: Array | None
    chosen: Places


class Lockstep:
    """Drives two sessions through the same steps.

    Args:
        reference, candidate: rows are added to both in the same order.
        limits: what is accepted.
        explainer: tells ties; None where eager stages may not run more than once a step: no ties, no edges.
        outcome: receives what is found.
        level: `stage` hands every stage the reference's inputs; `chain` lets differences travel until one is found.
        stages: names of the stages to report; all by default.
        stage_files: stage -> its file, to look at the choice of experts once per block; empty to leave that out.
    """

    def __init__(
        self,
        reference: SteppedSession,
        candidate: SteppedSession,
        limits: Limits,
        explainer: Explainer | None,
        outcome: Outcome,
        level: Literal["chain", "stage"] = "chain",
        stages: frozenset[str] | None = None,
        stage_files: Mapping[str, Path] | None = None,
    ) -> None:
        self.reference, self.candidate, self.limits, self.outcome = reference, candidate, limits, outcome
        self._explainer, self._level, self._stages = explainer, level, stages
        self._stage_files = stage_files or {}
        self._probed: set[str] = set()
        self.divergences: list[Divergence] = []
        """Of the last step."""

    def step(self, tokens: Mapping[int, Tokens]) -> tuple[dict[int, Logits], dict[int, Logits]]:
        """Feed the same tokens to both sides; row -> logits of each side."""
        first, second = self.reference.open_step(tokens), self.candidate.open_step(tokens)
        places = StepPlaces.of(first, self.reference.engine.config)
        self.divergences = []
        self._engram_ids: dict[int, Array] = {}
        for reference, candidate in zip(first.calls, second.calls, strict=True):
            self._stage(reference, candidate, places)
        self.outcome.steps += 1
        self.outcome.tokens += sum(first.counts.values())
        return self._commit(first, second)

    def _commit(self, first: OpenStep, second: OpenStep) -> tuple[dict[int, Logits], dict[int, Logits]]:
        return first.commit(), second.commit()

    # --- a stage --------------------------------------------------------------------------------------------

    def _stage(self, reference: StageCall, candidate: StageCall, places: StepPlaces) -> None:
        self._inputs(reference, candidate)
        reference.run()
        candidate.run()
        for spec in reference.spec.outputs:
            if spec.tensor == RESIDENT_LIKE[0] and spec.owner is not None:
                self._engram_ids[spec.owner] = np.array(reference.read(spec.name))
        compared = self._compare(reference, candidate, places)
        if self._reported(reference) and any(item.deviation.wrong.any() for item in compared):
            self._judge(reference, candidate, compared)
        else:
            for item in compared:
                self._track(reference, item, np.zeros_like(item.deviation.wrong))
        self._edges(reference, candidate, places)
        if self._level == "stage":
            hand_over(reference, candidate)

    def _reported(self, call: StageCall) -> bool:
        return self._stages is None or call.spec.name in self._stages

    def _inputs(self, reference: StageCall, candidate: StageCall) -> None:
        """What the sessions feed must be the same on both sides."""
        for spec in reference.spec.inputs:
            if spec.role != "step":
                continue
            first, second = np.atleast_2d(reference.read(spec.name)), np.atleast_2d(candidate.read(spec.name))
            if np.array_equal(first, second):
                continue
            rows = np.arange(first.shape[0])
            places = Places(rows=rows, slots=np.zeros_like(rows), positions=np.full_like(rows, -1))
            found = deviation(first, second, EXACT)
            finding = Finding(
                level=self._level,
                backend=self.outcome.backend,
                stage="session",
                tensor=spec.name,
                step=self.outcome.steps,
                kind=found.kind,
                error=found.worst,
                limit=EXACT,
                num_wrong=int(found.wrong.sum()),
                num_tokens=len(found.wrong),
                cause="input",
                worst=worst_coordinates(first, second, places, found.wrong),
            )
            self._keep(finding, reference, candidate, places)
            candidate.views[spec.name].write(reference.read(spec.name))

    def _compare(self, reference: StageCall, candidate: StageCall, places: StepPlaces) -> list[Compared]:
        stage = reference.spec
        return [
            compare_output(
                spec,
                reference.read(spec.name),
                candidate.read(spec.name),
                places,
                self.limits.of(stage.name, spec),
                self.limits.rounding,
            )
            for spec in in_causal_order(stage)
        ]

    def _judge(self, reference: StageCall, candidate: StageCall, compared: list[Compared]) -> None:
        """Separate ties from differences, name the cause of the first difference, and level the sides."""
        feed, ids = reference.feed(), self._engram_ids.get(reference.spec.layer_id or 0)
        choices = self._choices(reference, feed, ids)
        excused = {item.spec.name: self._excused(item, compared, choices) for item in compared}
        wrong = [item for item in compared if (item.deviation.wrong & ~excused[item.spec.name]).any()]
        for item in compared:
            self._track(reference, item, excused[item.spec.name] & item.deviation.wrong)
        if wrong:
            first = wrong[0]
            mask = first.deviation.wrong & ~excused[first.spec.name]
            finding = self._finding(reference, first, mask, wrong, self._cause(candidate, reference, feed, first, mask))
            self._keep(finding, reference, candidate, first.places.chosen(mask), feed, ids)
        elif choices is not None:
            tied = max(int((item.deviation.wrong & excused[item.spec.name]).sum()) for item in compared)
            self.outcome.ties[reference.spec.name] = self.outcome.ties.get(reference.spec.name, 0) + tied
        hand_over(reference, candidate)

    def _choices(self, call: StageCall, feed: Mapping[str, Array], ids: Array | None) -> Choices | None:
        if self._explainer is None or call.spec.layer_id is None:
            return None
        return self._explainer.choices(call.spec, inputs_for_eager(feed, ids))

    def _excused(self, item: Compared, compared: list[Compared], choices: Choices | None) -> Mask:
        """Tokens of a tensor whose difference follows from a tie."""
        none = np.zeros_like(item.deviation.wrong)
        if choices is None or item.spec.role == "state" or item.deviation.kind in ("not finite", "shape"):
            return none
        tie, places = self.limits.tie, item.places
        if item.spec.name in SCORES_OF:
            return choices.lists_tied(item.spec.name, item.reference, item.found, places, tie)
        if item.spec.tensor not in ("hidden_states", "pre_mix"):
            return none
        excused = choices.experts_tied(places, tie)
        for other in compared:
            if other.spec.name == "topk_indices":
                excused |= choices.lists_tied(other.spec.name, other.reference, other.found, places, tie)
        return excused

    def _cause(
        self, candidate: StageCall, reference: StageCall, feed: Mapping[str, Array], item: Compared, mask: Mask
    ) -> Cause:
        """Own, if the stage differs on the reference's inputs as well."""
        again = rerun_stage(candidate, self.candidate.engine.backend, feed)
        found = deviation(
            item.places.of(reference.read(item.spec.name)), item.places.of(again[item.spec.name]), item.limit
        )
        return "own" if (found.wrong & mask).any() else "came in"

    def _edges(self, reference: StageCall, candidate: StageCall, places: StepPlaces) -> None:
        """Once per stage, on a step of several tokens: inputs that a text does not bring about."""
        stage = reference.spec
        several = len(places.tokens.rows) > len(set(places.tokens.rows.tolist()))
        if self._explainer is None or stage.name in self._probed or not several or not self._reported(reference):
            return
        self._probed.add(stage.name)
        feed = reference.feed()
        resident = {spec.name: reference.read(spec.name) for spec in stage.inputs if spec.role == "resident"}
        self._gates(reference, candidate, feed, resident, places)
        if any(item.finding.stage == stage.name for item in self.divergences):
            return  # wrong on real inputs already
        for edge in edges(stage, feed, resident):
            changed = {**feed, **edge.changed}
            first = rerun_stage(reference, self.reference.engine.backend, changed)
            second = rerun_stage(candidate, self.candidate.engine.backend, changed)
            compared = [
                compare_output(
                    spec,
                    first[spec.name],
                    second[spec.name],
                    places,
                    self.limits.alone(stage.name, spec),
                    self.limits.rounding,
                )
                for spec in in_causal_order(stage)
            ]
            if any(item.deviation.wrong.any() for item in compared):
                self._edge_finding(reference, candidate, compared, changed, edge.name)

    def _gates(
        self,
        reference: StageCall,
        candidate: StageCall,
        feed: Mapping[str, Array],
        resident: Mapping[str, Array],
        places: StepPlaces,
    ) -> None:
        stage = reference.spec
        ids = self._engram_ids.get(stage.layer_id or 0)
        choices = self._choices(reference, feed, ids) if stage.name in self._stage_files else None
        if choices is not None:
            inputs = {**resident, **inputs_for_eager(candidate.feed(), ids)}
            file, tie = self._stage_files[stage.name], self.limits.tie
            self.outcome.agreements[f"{stage.name}.experts"] = gate_agreement(file, inputs, choices, places.tokens, tie)

    def _edge_finding(
        self, reference: StageCall, candidate: StageCall, compared: list[Compared], feed: Mapping[str, Array], name: str
    ) -> None:
        ids = self._engram_ids.get(reference.spec.layer_id or 0)
        choices = self._choices(reference, feed, ids)
        masks = {item.spec.name: item.deviation.wrong & ~self._excused(item, compared, choices) for item in compared}
        wrong = [item for item in compared if masks[item.spec.name].any()]
        if wrong:
            mask = masks[wrong[0].spec.name]
            finding = replace(self._finding(reference, wrong[0], mask, wrong, "own"), inputs=name)
            self._keep(finding, reference, candidate, wrong[0].places.chosen(mask), feed, ids)

    # --- bookkeeping ----------------------------------------------------------------------------------------

    def _finding(self, call: StageCall, item: Compared, mask: Mask, wrong: list[Compared], cause: Cause) -> Finding:
        lists = [other for other in wrong if other.spec.name in SCORES_OF]
        return Finding(
            level=self._level,
            backend=self.outcome.backend,
            stage=call.spec.name,
            tensor=item.spec.name,
            step=self.outcome.steps,
            kind=item.deviation.kind,
            error=float(item.deviation.errors[mask].max()),
            limit=item.limit,
            num_wrong=int(mask.sum()),
            num_tokens=len(mask),
            cause=cause,
            worst=worst_coordinates(item.reference, item.found, item.places, mask),
            selections=tuple(change for other in lists for change in selection_changes(other)),
            also=tuple(other.spec.name for other in wrong[1:]),
        )

    def _keep(
        self,
        finding: Finding,
        reference: StageCall,
        candidate: StageCall,
        chosen: Places,
        feed: Mapping[str, Array] | None = None,
        engram_ids: Array | None = None,
    ) -> None:
        self.outcome.findings.append(finding)
        self.divergences.append(
            Divergence(
                finding=finding,
                reference=reference,
                candidate=candidate,
                feed=feed or {},
                engram_ids=engram_ids,
                chosen=chosen,
            )
        )

    def _track(self, call: StageCall, item: Compared, excused: Mask) -> None:
        if not self._reported(call):
            return
        key = f"{call.spec.name}.{item.spec.name}"
        track = self.outcome.tracks.setdefault(key, Track(limit=item.limit))
        track.add(item.deviation, item.deviation.wrong & ~excused, excused, item.places.positions.tolist())
        if item.spec.name in SCORES_OF:
            agreement = self.outcome.agreements.setdefault(key, Agreement())
            agreement.compared += len(item.deviation.wrong)
            agreement.same += int((~item.deviation.wrong).sum())
            agreement.tied += int(excused.sum())
