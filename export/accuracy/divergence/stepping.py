"""A session whose step is taken stage by stage, so that two chains can be held against each other in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.runtime.execution import BoundChain
from engram_trt.runtime.session import Logits, Selection, Session, Tokens
from engram_trt.runtime.stage_runners.contract import Array, Run, StageRunner, View
from engram_trt.runtime.step_inputs import RowInput

RESIDENT_LIKE = ("engram_ids", "engram_rows", "engram_scales")
"""Inputs a back end may bind to staged rows of a table instead of the table: never carried over to another side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """One stage of an open step.

    Args:
        runner: the stage as its back end has it.
        views: what it is bound to in this step.
        runs: functions to call in order; the last one is the stage, those before it wait for Engram rows.
    """

    runner: StageRunner
    views: Mapping[str, View]
    runs: tuple[Run, ...]

    @property
    def spec(self) -> StageSpec:
        return self.runner.spec

    def run(self) -> None:
        """Compute the stage. Calling it again computes the same: states are written before they are read."""
        for run in self.runs:
            run()

    def again(self) -> None:
        """Compute the stage alone once more, on inputs that somebody changed."""
        self.runs[-1]()

    def read(self, name: str) -> Array:
        """A bound tensor on the host; it may share memory with the buffer."""
        return self.views[name].read()

    def carried_inputs(self) -> list[TensorSpec]:
        """Inputs that mean the same on every back end: not the weights, and not what is staged in their place."""
        return [spec for spec in self.spec.inputs if spec.role != "resident" and spec.name not in RESIDENT_LIKE]

    def feed(self) -> dict[str, Array]:
        """Copies of the carried inputs."""
        return {spec.name: np.array(self.read(spec.name)) for spec in self.carried_inputs()}


def hand_over(reference: StageCall, candidate: StageCall) -> None:
    """Give the candidate the reference's outputs."""
    for spec in reference.spec.outputs:
        first = reference.read(spec.name)
        if not np.array_equal(first, candidate.read(spec.name)):
            candidate.views[spec.name].write(first)


class SteppedSession(Session):
    """A session that opens a step, lets its caller run the stages, and then commits."""

    def open_step(self, tokens: Mapping[int, Tokens], logits: Selection = "last") -> OpenStep:
        """Check, bind and fill a step; nothing of the session changes before `OpenStep.commit`.

        Raises:
            RequestError: as `Session.step`.
        """
        inputs = {row: RowInput.of(value) for row, value in tokens.items()}
        self._check(inputs)
        chain = self._bound_chain(inputs, logits)
        self._fill(chain, inputs, logits)
        return OpenStep(self, chain, inputs, logits)

    def finish_step(self, chain: BoundChain, inputs: Mapping[int, RowInput], logits: Selection) -> dict[int, Logits]:
        """Read the logits and commit."""
        results = self._read_logits(chain, inputs, logits)
        self._commit(chain, inputs)
        return results


class OpenStep:
    """A step between filling and committing.

    Attributes:
        calls: the stages in order.
        starts: row -> position of its first token in this step.
        counts: row -> tokens it gets.
    """

    def __init__(
        self, session: SteppedSession, chain: BoundChain, inputs: Mapping[int, RowInput], logits: Selection
    ) -> None:
        self._session, self._chain, self._inputs, self._logits = session, chain, inputs, logits
        self.starts = {row: session.length(row) for row in inputs}
        self.counts = {row: int(row_input.token_ids.shape[0]) for row, row_input in inputs.items()}
        runners = {runner.spec.name: runner for runner in session.engine.runners}
        self.calls: list[StageCall] = []
        waiting: list[Run] = []
        for name, run in chain.runs:
            waiting.append(run)
            if name in runners:
                views = chain.views[name]
                self.calls.append(StageCall(runner=runners[name], views=views, runs=tuple(waiting)))
                waiting = []

    def commit(self) -> dict[int, npt.NDArray[np.float32]]:
        """Count the tokens as fed; row -> logits as `Session.step` returns them."""
        return self._session.finish_step(self._chain, self._inputs, self._logits)
