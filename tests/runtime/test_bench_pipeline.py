"""The benchmark of sequences in flight: what it runs, and that its accounting adds up. No figure is held to a limit."""

from __future__ import annotations

import pytest
import torch
from small_model import small_engine

from engram_trt.runtime.bench_pipeline import LocalRecorder, bench_pipeline
from engram_trt.runtime.engine import Engine

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def test_results(engine: Engine) -> None:
    recorder = LocalRecorder(engine)
    (pipeline, spans), (batch, none) = bench_pipeline(engine, recorder, 2, 4, 3, repeats=1)
    assert (pipeline["benchmark"], batch["benchmark"], none) == ("pipeline", "batch", [])
    assert (pipeline["ranks"], pipeline["sequences"], batch["sequences"]) == (1, 2, 2)
    # two prompts of one step each, and two more steps for each sequence
    assert [span.name for span in spans].count("head") == 6
    assert set(pipeline["stage_ms"]) == {stage.name for stage in engine.stages}
    (kinds,) = pipeline["accounting_ms"].values()
    assert kinds["compute"] == pytest.approx(sum((s.end_ns - s.start_ns) / 1e6 for s in spans), abs=0.01)
    assert kinds["compute"] + kinds["bubble"] == pytest.approx(6 / pipeline["tokens_per_s"] * 1e3, rel=0.05)
    assert not engine.timeline.is_on


def test_no_batch_beyond_the_limit(engine: Engine) -> None:
    results = [result["benchmark"] for result, _ in bench_pipeline(engine, LocalRecorder(engine), 4, 2, 1, repeats=1)]
    assert engine.deployment.limits.max_batch == 3
    assert results == ["pipeline"]


def test_the_tokens_have_a_digest_that_tells_prompts_apart(engine: Engine) -> None:
    digests = [
        next(iter(bench_pipeline(engine, LocalRecorder(engine), 2, length, 2, repeats=1)))[0]["digest_of_tokens"]
        for length in (5, 5, 6)
    ]
    assert digests[0] == digests[1] != digests[2]
