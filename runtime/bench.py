"""Speed of a chain, measured side by side with another back end in one run: this class of machine is noisy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram.staging import ROWS, SCALES
from engram_trt.runtime.session import Session

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """How much to measure.

    Args:
        prompt_tokens: of one prefill.
        decode_steps: per back end, after as many tokens of context as a prompt has.
        repeats: prefills per back end.
    """

    prompt_tokens: int = 128
    decode_steps: int = 60
    repeats: int = 5


def bench_load(artifact: Artifact, name: str, engine: Engine) -> Result:
    """What loading took: milliseconds and bytes, dense weights and bound experts, of every stage."""
    dense = {record.spec.name: record.data.num_bytes for record in artifact.manifest.stages}
    stage_bytes = {ready.stage: dense[ready.stage] + ready.resident_bytes for ready in engine.ready}
    return {
        "benchmark": "load",
        "backend": name,
        "ready_ms": round(sum(ready.seconds for ready in engine.ready) * 1e3, 1),
        "bytes": sum(stage_bytes.values()),
        "stage_ms": {ready.stage: round(ready.seconds * 1e3, 2) for ready in engine.ready},
        "stage_bytes": stage_bytes,
    }


def bench_chain(engines: Mapping[str, Engine], config: BenchConfig) -> Iterator[Result]:
    """Prefill and decode of one row; back ends take turns step by step.

    Args:
        engines: by back end; ratios are to the last one.
        config: how much.

    Yields:
        one result per back end and phase, with tokens/s, the share of a step outside the stage runs, and the
        ratio to the last back end.
    """
    prompt = random_ids(next(iter(engines.values())), config.prompt_tokens)
    sessions = {name: Session(engine) for name, engine in engines.items()}
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(config.repeats + 1):
        for name, session in sessions.items():
            session.reset()
            row = session.add()
            started = perf_counter()
            session.prefill(row, prompt)
            if repeat:  # the first one binds buffers and warms caches
                prefill[name].append(perf_counter() - started)
    decode: dict[str, list[float]] = {name: [] for name in engines}
    outside: dict[str, list[float]] = {name: [] for name in engines}
    stages: dict[str, dict[str, float]] = {}
    for step in range(config.decode_steps + 3):
        for name, session in sessions.items():
            started = perf_counter()
            session.step({0: [prompt[step % len(prompt)]]})
            total = perf_counter() - started
            if step >= 3:
                decode[name].append(total)
                outside[name].append(1 - sum(session.stage_seconds.values()) / total)
                stages[name] = dict(session.stage_seconds)
    yield from _rates("prefill", prefill, config.prompt_tokens, {})
    shares = {
        name: {
            "outside_stage_runs": round(median(outside[name]), 4),
            "stage_ms": {stage: round(seconds * 1e3, 4) for stage, seconds in stages[name].items()},
        }
        for name in engines
    }
    yield from _rates("decode", decode, 1, shares)


def _rates(
    phase: str, seconds: Mapping[str, Sequence[float]], tokens: int, extra: Mapping[str, Result]
) -> Iterator[Result]:
    baseline = list(seconds)[-1]
    for name, values in seconds.items():
        result: Result = {
            "benchmark": phase,
            "backend": name,
            "rows": 1,
            "tokens": tokens,
            "tokens_per_s": round(tokens / median(values), 2),
            "step_ms": {
                "min": round(min(values) * 1e3, 3),
                "median": round(median(values) * 1e3, 3),
                "max": round(max(values) * 1e3, 3),
            },
        }
        if name != baseline:
            result["speedup_over"] = {baseline: round(median(seconds[baseline]) / median(values), 2)}
        yield {**result, **extra.get(name, {})}


def bench_engram(artifact: Artifact, engine: Engine, repeats: int = 20) -> Iterator[Result]:
    """Rates of the hash stage and of a host gather of random rows from each resident table."""
    if not artifact.config.has_engram:
        return
    session = Session(engine)
    tokens = session.limits.max_step_tokens
    ids = random_ids(engine, tokens)
    seconds = []
    for _ in range(repeats):
        session.reset()
        session.step({session.add(): ids})
        seconds.append(session.stage_seconds["engram_hash"])
    columns = artifact.config.engram_columns * len(artifact.config.engram_layer_ids)
    yield {
        "benchmark": "engram_hash",
        "backend": engine.backend.name,
        "tokens": tokens,
        "tokens_per_s": round(tokens / median(seconds), 1),
        "ids_per_s": round(tokens * columns / median(seconds), 1),
    }
    for layer_id in artifact.config.engram_layer_ids:
        yield _bench_gather(artifact, layer_id, repeats)


def _bench_gather(artifact: Artifact, layer_id: int, repeats: int) -> Result:
    spec = next(stage for stage in artifact.stages if stage.layer_id == layer_id and ROWS in stage.input_names)
    rows, scales = artifact.resident(spec, ROWS), artifact.resident(spec, SCALES)
    random = np.random.default_rng(0)
    seconds = []
    for _ in range(repeats):
        ids = random.integers(0, rows.shape[0], size=4096)
        started = perf_counter()
        np.take(rows, ids, axis=0), np.take(scales, ids, axis=0)
        seconds.append(perf_counter() - started)
    return {
        "benchmark": "engram_gather",
        "layer_id": layer_id,
        "table_rows": int(rows.shape[0]),
        "rows_per_s": round(4096 / median(seconds), 1),
        "bytes_per_s": round(4096 * (rows.shape[1] + scales.shape[1]) / median(seconds), 1),
    }


def random_ids(engine: Engine, count: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt that means nothing."""
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(3, engine.config.vocab_size, size=count)]
