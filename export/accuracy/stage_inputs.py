"""Inputs of a stage that mean something: captured from the chain while it runs a real prompt.

Random token or row ids say nothing about a stage, and random caches hide faults. These inputs are what the stage
gets in use: a prefill step from an empty session, a later prefill step, and decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.execution import BoundChain
from engram_trt.runtime.session import Session

Feed = dict[str, npt.NDArray[Any]]


def capture_inputs(engine: Engine, prompt: Sequence[int], stage: str, num_decode_steps: int = 2) -> Iterator[Feed]:
    """Run a prompt through the chain and yield what one stage is given, step by step.

    Args:
        engine: any back end whose tensors numpy can hold.
        prompt: token ids; fed in up to three steps, the last tokens one by one.
        stage: name of the stage.
        num_decode_steps: how many tokens are fed one by one.

    Yields:
        binding name -> copy of the array.

    Raises:
        RequestError: there is no such stage, or the prompt is too short.
    """
    names = [spec.name for spec in engine.stages]
    if stage not in names or len(prompt) <= num_decode_steps:
        raise RequestError(
            f"stage {stage}, prompt of {len(prompt)} tokens",
            found="a stage that is not in the chain" if stage not in names else "too short a prompt",
            expected=f"one of {', '.join(names)}; more than {num_decode_steps} tokens",
            remedy="Name another stage or give a longer prompt.",
        )
    session = _Capturing(engine, stage)
    row = session.add()
    for part in _cut(list(prompt), num_decode_steps, session.limits.max_step_tokens):
        session.step({row: part})
        yield session.captured


def _cut(prompt: list[int], num_decode_steps: int, max_step_tokens: int) -> list[list[int]]:
    filled, tail = prompt[:-num_decode_steps], prompt[-num_decode_steps:]
    size = min(-(-len(filled) // 2), max_step_tokens)
    parts = [filled[start : start + size] for start in range(0, min(len(filled), 2 * size), size)]
    return parts + [[token] for token in tail]


class _Capturing(Session):
    """A session that copies one stage's inputs just before it runs: caches are updated in place."""

    def __init__(self, engine: Engine, stage: str) -> None:
        super().__init__(engine)
        self._stage = stage
        self.captured: Feed = {}

    def _bound_chain(self, inputs: Any, logits: Any) -> BoundChain:
        chain = super()._bound_chain(inputs, logits)
        spec = next(spec for spec in self.engine.stages if spec.name == self._stage)
        views = {name: chain.views[self._stage][name] for name in spec.input_names}

        def copying(run: Any) -> Any:
            def first_copy() -> None:
                self.captured = {name: np.array(view.read()) for name, view in views.items()}
                run()

            return first_copy

        runs = tuple((name, copying(run) if name == self._stage else run) for name, run in chain.runs)
        return replace(chain, runs=runs)


def artifact_of_stage(onnx_path: Path) -> tuple[Path, str]:
    """The artefact folder and stage name behind `DIR/stages/NAME.onnx`."""
    return onnx_path.resolve().parent.parent, onnx_path.stem
