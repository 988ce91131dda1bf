"""Speed of several sequences in flight over the devices of a chain, and what every device did meanwhile."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from engram_trt.runtime.bench import random_ids
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.generation import GenerationConfig, generate_together
from engram_trt.runtime.session import Session
from engram_trt.runtime.timeline import Span, accounting, stage_milliseconds

Result = dict[str, Any]


class Recorder(ABC):
    """Records when stages run, in all processes of a chain."""

    num_ranks: int

    @abstractmethod
    def start_recording(self) -> None:
        """Begin anew."""

    @abstractmethod
    def stop_recording(self) -> list[Span]:
        """End; the spans of all processes."""


class LocalRecorder(Recorder):
    """Of a chain in one process."""

    num_ranks = 1

    def __init__(self, engine: Engine) -> None:
        self._timeline = engine.timeline

    def start_recording(self) -> None:
        self._timeline.spans.clear()
        self._timeline.is_on = True

    def stop_recording(self) -> list[Span]:
        self._timeline.is_on = False
        return list(self._timeline.spans)


def bench_pipeline(
    engine: Engine, recorder: Recorder, sequences: int, prompt_tokens: int, new_tokens: int, repeats: int = 3
) -> Iterator[tuple[Result, list[Span]]]:
    """Decode several sequences, each a micro-batch, after short prompts.

    Args:
        engine: of the whole chain.
        recorder: for the accounting of the last repetition.
        sequences: in flight at once.
        prompt_tokens, new_tokens: of each.
        repeats: measured, after one that warms up.

    Yields:
        a result and the spans of its last repetition: `pipeline`, and `batch` (all sequences as rows of one step,
        without micro-batches) where the limits allow it. A token of the pipeline is a step of one row.
    """
    prompts = [random_ids(engine, prompt_tokens, seed) for seed in range(sequences)]
    config = GenerationConfig(max_tokens=new_tokens, ignore_eos=True)
    seconds: list[float] = []
    for repeat in range(repeats + 1):
        if repeat == repeats:
            recorder.start_recording()
        started = time.perf_counter()
        tokens = generate_together(engine, prompts, config)
        if repeat:
            seconds.append(time.perf_counter() - started)
    spans = recorder.stop_recording()
    total = sequences * new_tokens
    yield (
        {
            "benchmark": "pipeline",
            "backend": engine.backend.name,
            "ranks": recorder.num_ranks,
            "sequences": sequences,
            "prompt_tokens": prompt_tokens,
            "tokens_per_s": round(total / median(seconds), 2),
            "tokens_per_s_range": [round(total / max(seconds), 2), round(total / min(seconds), 2)],
            "digest_of_tokens": _digest(tokens),
            "accounting_ms": accounting(spans, round(seconds[-1] * 1e9)),
            "stage_ms": {name: round(ms / total, 4) for name, ms in stage_milliseconds(spans).items()},
        },
        spans,
    )
    if engine.deployment.limits.max_batch >= sequences:
        yield _bench_batch(engine, prompts, new_tokens, repeats), []


def _bench_batch(engine: Engine, prompts: list[list[int]], new_tokens: int, repeats: int) -> Result:
    """The same sequences as rows of one batch: one step gives one token of each."""
    session, seconds = Session(engine), []
    for repeat in range(repeats + 1):
        session.reset()
        rows = [session.add() for _ in prompts]
        started = time.perf_counter()
        for row, prompt in zip(rows, prompts, strict=True):
            logits = {row: session.prefill(row, prompt)}
        logits = {row: logits[rows[-1]] for row in rows}
        for _ in range(new_tokens - 1):
            logits = session.step({row: [int(np.argmax(logits[row]))] for row in rows})
        if repeat:
            seconds.append(time.perf_counter() - started)
    total = len(prompts) * new_tokens
    return {
        "benchmark": "batch",
        "backend": engine.backend.name,
        "sequences": len(prompts),
        "tokens_per_s": round(total / median(seconds), 2),
    }


def _digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
