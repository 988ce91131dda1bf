"""Generation from a session: limits, end of sequence, rows given back."""

from __future__ import annotations

import numpy as np
import pytest
from small_model import LIMITS, small_engine

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.generation import Generation, GenerationConfig
from engram_trt.runtime.sampling import SamplingConfig
from engram_trt.runtime.session import Session


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def test_greedy_tokens_are_the_argmax_of_the_logits(engine: Engine) -> None:
    prompt = [0, 9, 4, 33]
    generation = Generation(Session(engine), prompt, GenerationConfig(max_tokens=6, ignore_eos=True))
    tokens = list(generation)
    assert len(tokens) == 6
    assert generation.finish_reason == "length"
    session = Session(engine)
    row = session.add()
    logits = session.prefill(row, [*prompt, *tokens], "all")
    assert [int(np.argmax(logits[position])) for position in range(3, 9)] == tokens


def test_it_stops_at_the_end_of_the_sequence(engine: Engine) -> None:
    """Sampling at a high temperature meets the end-of-sequence id sooner or later; what comes before is kept."""
    for seed in range(40):
        config = GenerationConfig(max_tokens=40, sampling=SamplingConfig(temperature=5.0, seed=seed))
        generation = Generation(Session(engine), [0, 5], config)
        tokens = list(generation)
        if generation.finish_reason == "eos":
            assert engine.config.eos_token_id not in tokens
            longer = GenerationConfig(max_tokens=40, sampling=config.sampling, ignore_eos=True)
            ignoring = list(Generation(Session(engine), [0, 5], longer))
            assert ignoring[: len(tokens) + 1] == [*tokens, engine.config.eos_token_id]
            assert len(ignoring) == 40
            return
    pytest.fail("no answer of 40 ended")


def test_an_abandoned_answer_gives_its_row_back(engine: Engine) -> None:
    session = Session(engine)
    for _ in range(LIMITS.max_batch + 1):
        stream = iter(Generation(session, [0, 5], GenerationConfig(max_tokens=4, ignore_eos=True)))
        next(stream)
        stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("prompt", "new"), [([], 4), ([3] * 60, 5), ([3], 0)])
def test_limits_are_checked_before_anything_runs(engine: Engine, prompt: list[int], new: int) -> None:
    with pytest.raises(RequestError, match="max_context = 64"):
        Generation(Session(engine), prompt, GenerationConfig(max_tokens=new))
