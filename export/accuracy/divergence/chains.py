"""Compare whole chains: prompts in groups, prefill in chunks, decode step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.divergence.findings import Outcome
from engram_trt.export.accuracy.divergence.lockstep import Divergence, Lockstep
from engram_trt.export.accuracy.divergence.prompts import Prompt, PromptSet, chunks
from engram_trt.export.accuracy.divergence.stepping import SteppedSession
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Logits
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

SESSION_BYTES = 1 << 30
"""What a session of a comparison may hold; decides how many rows run together."""

MOST_ROWS = 32
WIDENED = ("torch", OnnxRuntimeBackend.name)
"""Back ends whose stages take any batch; an engine of TensorRT was built for the artefact's."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the rows are fed.

    Args:
        prompts: the rows.
        free: tokens behind the prompts are each side's own choice, as long as both choose the same.
        keep_going: do not stop after the first step with a difference.
    """

    prompts: PromptSet
    free: bool = False
    keep_going: bool = False


def widened(engine: Engine) -> Engine:
    """The engine with as many rows as memory allows, where the back end takes any number.

    More rows a step make a comparison quicker and change nothing in a row: stages are symbolic in the batch.
    """
    if engine.backend.name not in WIDENED:
        return engine
    limits = engine.deployment.limits
    one = symbol_limits(engine.config, replace(limits, max_batch=1))
    tensors = {
        spec.key: spec for stage in engine.stages for spec in (*stage.inputs, *stage.outputs) if spec.role != "resident"
    }
    row_bytes = sum(spec.num_bytes(one) for spec in tensors.values())
    rows = max(limits.max_batch, min(MOST_ROWS, SESSION_BYTES // max(row_bytes, 1)))
    return replace(engine, deployment=replace(engine.deployment, limits=replace(limits, max_batch=rows)))


def compare_chains(
    make_lockstep: Callable[[SteppedSession, SteppedSession], Lockstep],
    reference: Engine,
    candidate: Engine,
    schedule: Schedule,
    outcome: Outcome,
    explain: Callable[[Divergence], None],
    progress: Progress,
) -> None:
    """Run both chains over all prompts; `outcome` receives what is found.

    Args:
        make_lockstep: joins two sessions.
        reference, candidate: the chains.
        schedule: what is fed.
        outcome: of this candidate.
        explain: called with the first divergence, while both sides still stand at it.
        progress: told (text, done, total).
    """
    first, second = widened(reference), widened(candidate)
    lockstep = make_lockstep(SteppedSession(first), SteppedSession(second))
    limits = replace(first.deployment.limits)
    width = min(limits.max_batch, second.deployment.limits.max_batch)
    groups = list(schedule.prompts.groups(width))
    total = sum(_num_steps(group, index, reference.config, limits) for index, group in enumerate(groups))
    for index, group in enumerate(groups):
        for session in (lockstep.reference, lockstep.candidate):
            session.reset()
            for _ in group:
                session.add()
        for _ in _steps(lockstep, group, index, reference.config, schedule.free):
            progress(f"{outcome.backend}: group {index + 1} of {len(groups)}", outcome.steps, total)
            if lockstep.divergences:
                if len(outcome.findings) == len(lockstep.divergences):
                    explain(lockstep.divergences[0])
                if not schedule.keep_going:
                    outcome.notes.append("stopped after the first step with a difference (--keep-going goes on)")
                    return


def _num_steps(group: Sequence[Prompt], index: int, config: ModelConfig, limits: Limits) -> int:
    longest = max(prompt.num_prompt for prompt in group)
    return len(chunks(longest, index, config, limits.max_step_tokens)) + max(prompt.num_decode for prompt in group)


def _steps(lockstep: Lockstep, group: Sequence[Prompt], index: int, config: ModelConfig, free: bool) -> Iterator[None]:
    """Feed a group; yields after every step."""
    longest = max(prompt.num_prompt for prompt in group)
    done = 0
    last: dict[int, tuple[Logits, Logits]] = {}
    for size in chunks(longest, index, config, lockstep.reference.limits.max_step_tokens):
        parts = {row: prompt.ids[done : min(done + size, prompt.num_prompt)] for row, prompt in enumerate(group)}
        first, second = lockstep.step({row: part for row, part in parts.items() if part})
        last |= {row: (first[row], second[row]) for row in first}
        done += size
        yield
    split: set[int] = set()
    for offset in range(max(prompt.num_decode for prompt in group)):
        tokens = {}
        for row, prompt in enumerate(group):
            if offset >= prompt.num_decode or row in split:
                continue
            token = prompt.ids[prompt.num_prompt + offset]
            if free:
                choices = [int(np.argmax(logits)) for logits in last[row]]
                if choices[0] != choices[1]:
                    split.add(row)  # from here on the rows are different texts
                    lockstep.outcome.notes.append(f"prompt row {row}: the sides chose different tokens at {offset}")
                    continue
                token = choices[0]
            tokens[row] = [token]
        if not tokens:
            return
        first, second = lockstep.step(tokens)
        last |= {row: (first[row], second[row]) for row in first}
        yield
