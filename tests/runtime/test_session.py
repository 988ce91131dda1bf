"""A row's result depends on its own tokens only: not on chunks, batch mates, padding, old cache contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_model import LIMITS, small_config, small_engine

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.step_inputs import RowInput

NOISE = 2e-4
"""Float noise of another shape of the same products; logits have a standard deviation near 1."""

QUICK = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTH = 30

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def tokens_of(seed: int, length: int = LENGTH) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 90, length)


def image_input(seed: int, start: int, stop: int) -> RowInput:
    """Text with one image span at [start, stop)."""
    random = np.random.default_rng(seed)
    ids = tokens_of(seed)
    ids[start:stop] = 90
    mask = np.zeros(LENGTH, dtype=np.bool_)
    mask[start:stop] = True
    return RowInput(
        token_ids=ids,
        image_mask=mask,
        image_embeddings=random.standard_normal((LENGTH, 32)).astype(np.float32),
    )


_KNOWN: dict[bytes, npt.NDArray[np.float32]] = {}


def one_shot(engine: Engine, row_input: RowInput) -> npt.NDArray[np.float32]:
    """Logits at all positions from single-token steps of a fresh session: the simplest schedule."""
    mask = row_input.image_mask
    key = row_input.token_ids.tobytes() + (b"" if mask is None else mask.tobytes())
    if key not in _KNOWN:
        session = Session(engine)
        row = session.add()
        parts = [session.step({row: row_input.slice(p, p + 1)}, "all")[row] for p in range(LENGTH)]
        _KNOWN[key] = np.concatenate(parts)
    return _KNOWN[key]


def poison(session: Session) -> None:
    """Fill every cache with NaN, as memory that was never written may be."""
    for buffer in session.buffers.state_buffers().values():
        buffer.storage.fill_(float("nan"))  # type: ignore[attr-defined]


def cut(length: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive chunks of a sequence, the last sizes repeated as often as needed."""
    chunks, start = [], 0
    for size in [*sizes, *([sizes[-1]] * length)]:
        if start >= length:
            break
        chunks.append((start, min(start + size, length)))
        start += size
    return chunks


chunk_sizes = st.lists(st.integers(1, LIMITS.max_step_tokens), min_size=1, max_size=8)


@QUICK
@given(sizes=chunk_sizes, seed=st.integers(0, 3))
def test_chunking(engine: Engine, sizes: list[int], seed: int) -> None:
    row_input = RowInput.of(tokens_of(seed))
    session = Session(engine)
    poison(session)
    row = session.add()
    parts = [session.step({row: row_input.slice(*chunk)}, "all")[row] for chunk in cut(LENGTH, sizes)]
    np.testing.assert_allclose(np.concatenate(parts), one_shot(engine, row_input), atol=NOISE)


@QUICK
@given(sizes=chunk_sizes, span=st.sampled_from([(0, 3), (4, 13), (10, 11), (17, 26)]))
def test_image_span_across_chunks(engine: Engine, sizes: list[int], span: tuple[int, int]) -> None:
    row_input = image_input(7, *span)
    session = Session(engine)
    row = session.add()
    parts = [session.step({row: row_input.slice(*chunk)}, "all")[row] for chunk in cut(LENGTH, sizes)]
    np.testing.assert_allclose(np.concatenate(parts), one_shot(engine, row_input), atol=NOISE)


def test_image_positions_change_the_result(engine: Engine) -> None:
    """The mask, the embeddings and the broken n-grams all act; otherwise the test above shows nothing."""
    with_image = image_input(7, 10, 14)
    as_text = RowInput.of(with_image.token_ids)
    difference = np.abs(one_shot(engine, with_image) - one_shot(engine, as_text)).max(axis=1)
    assert (difference[:10] < NOISE).all()
    assert (difference[10:] > 10 * NOISE).all()


@QUICK
@given(schedule=st.lists(st.tuples(*[st.integers(0, 6)] * 3).filter(any), min_size=4, max_size=10))
def test_batch_mates_and_padding(engine: Engine, schedule: list[tuple[int, int, int]]) -> None:
    inputs = [tokens_of(seed) for seed in range(3)]
    expected = [one_shot(engine, RowInput.of(ids)) for ids in inputs]
    session = Session(engine)
    poison(session)
    rows, done = [session.add() for _ in inputs], [0, 0, 0]
    for counts in schedule:
        ends = [min(begin + count, LENGTH) for begin, count in zip(done, counts, strict=True)]
        step = {rows[i]: inputs[i][done[i] : ends[i]] for i in range(3) if ends[i] > done[i]}
        results = session.step(step, "all") if step else {}
        for i, row in enumerate(rows):
            if row in results:
                np.testing.assert_allclose(results[row], expected[i][done[i] : ends[i]], atol=NOISE)
        done = ends


class Diary:
    """A plain model of one row: what it has been fed, and the longest that has been."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.longest = 0

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += [int(token) for token in tokens]
        self.longest = max(self.longest, len(self.tokens))

    def most_to_forget(self) -> int:
        return len(self.tokens) - max(0, self.longest - LIMITS.max_rollback)


@settings(QUICK, max_examples=8)
@given(data=st.data())
def test_rollback(engine: Engine, data: st.DataObject) -> None:
    """After any appends and rollbacks, the next logits are those of the remaining tokens fed afresh."""
    session, diary = Session(engine), Diary()
    poison(session)
    row = session.add()
    for _ in range(data.draw(st.integers(2, 6))):
        room = LIMITS.max_context - len(diary.tokens)
        chunk = data.draw(st.lists(st.integers(3, 89), min_size=1, max_size=min(LIMITS.max_step_tokens, room)))
        session.step({row: chunk})
        diary.append(chunk)
        back = data.draw(st.integers(0, min(diary.most_to_forget(), len(diary.tokens) - 1)))
        session.rollback(row, back)
        diary.tokens = diary.tokens[: len(diary.tokens) - back]
        if len(diary.tokens) >= LIMITS.max_context - 1:
            break
    assert session.length(row) == len(diary.tokens)
    logits = session.step({row: [7]})[row]
    fresh = Session(engine)
    expected = fresh.prefill(fresh.add(), [*diary.tokens, 7])
    np.testing.assert_allclose(logits, expected, atol=NOISE)


def test_rollback_is_bounded(engine: Engine) -> None:
    session = Session(engine)
    row = session.add()
    session.prefill(row, tokens_of(1, 20))
    session.rollback(row, 3)
    with pytest.raises(RequestError, match=r"0\.\.2 \(max_rollback = 5\)"):
        session.rollback(row, 3)
    session.rollback(row, 2)
    assert session.length(row) == 15


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_stage", [0, 4, 9])
def test_a_broken_step_leaves_the_session_as_it_was(
    engine: Engine, failure: type[BaseException], at_stage: int
) -> None:
    ids = tokens_of(2)
    session = Session(engine)
    row = session.add()
    session.prefill(row, ids[:11])

    chain = session._bound_chain({row: RowInput.of(ids[11:18])}, "all")
    name, run = chain.runs[at_stage]

    def broken() -> None:
        run()
        raise failure

    key = next(key for key, value in session._chains.items() if value is chain)
    runs = (*chain.runs[:at_stage], (name, broken), *chain.runs[at_stage + 1 :])
    session._chains[key] = replace(chain, runs=runs)
    with pytest.raises(failure):
        session.step({row: ids[11:18]}, "all")
    assert session.length(row) == 11
    del session._chains[key]

    untouched = Session(engine)
    other = untouched.add()
    untouched.prefill(other, ids[:11])
    expected = untouched.step({other: ids[11:18]}, "all")[other]
    np.testing.assert_array_equal(session.step({row: ids[11:18]}, "all")[row], expected)


def test_a_reused_row_knows_nothing_of_its_predecessor(engine: Engine) -> None:
    session = Session(engine)
    row = session.add()
    session.prefill(row, tokens_of(3))
    session.finish(row)
    assert session.add() == row
    fresh = Session(engine)
    np.testing.assert_array_equal(
        session.prefill(row, tokens_of(4), "all"), fresh.prefill(fresh.add(), tokens_of(4), "all")
    )


def test_idle_rows_keep_their_place(engine: Engine) -> None:
    """A row that sits out many steps of its neighbours goes on as if nothing had happened."""
    ids = tokens_of(5)
    session = Session(engine)
    low, high = session.add(), session.add()
    session.step({low: ids[:9], high: ids[:4]})
    for token in ids[4:16]:
        session.step({high: [token]})
    np.testing.assert_allclose(
        session.step({low: ids[9:15]}, "all")[low], one_shot(engine, RowInput.of(ids))[9:15], atol=NOISE
    )


def test_taps_are_the_mean_input_streams() -> None:
    changes = {"dspark_block_size": 2, "n_mtp_layers": 1, "dspark_target_layer_ids": [3, 6], "dspark_markov_rank": 32}
    config = small_config(**changes, dspark_noise_token_id=1)
    session = Session(small_engine(config, dspark_taps=True))
    row = session.add()
    session.step({row: tokens_of(1, 6)})
    assert session.taps[row].shape == (6, 2 * config.dim)
    assert np.isfinite(session.taps[row]).all()
    silent = Session(small_engine(config))
    row = silent.add()
    silent.step({row: tokens_of(1, 6)})
    assert silent.taps == {}


class TestRefusals:
    """One error each, before anything runs, and the session goes on."""

    @pytest.fixture
    def session(self, engine: Engine) -> Session:
        session = Session(engine)
        session.add()
        return session

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([96], r"id 96; expected 0\.\.95"),
            ([3, -1], r"token 1 of the step: found id -1"),
            ([], "no tokens"),
            ([3] * 13, "max_step_tokens = 12"),
            ([[3, 4]], "flat sequence of integers"),
            ([1.5], "flat sequence of integers"),
        ],
    )
    def test_tokens(self, session: Session, tokens: list[int], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            session.step({0: tokens})
        assert session.length(0) == 0

    def test_context(self, session: Session) -> None:
        session.prefill(0, [3] * 60)
        with pytest.raises(RequestError, match="60 tokens and 5 new ones; expected at most max_context = 64"):
            session.step({0: [3] * 5})
        with pytest.raises(RequestError, match=r"prompt of 5 tokens; expected 1\.\.4"):
            session.prefill(0, [3] * 5)
        session.step({0: [3] * 4})

    def test_rows(self, session: Session) -> None:
        with pytest.raises(RequestError, match="row 1: found a row that was not added"):
            session.step({1: [3]})
        session.add(), session.add()
        with pytest.raises(RequestError, match="max_batch = 3"):
            session.add()
        session.finish(1)
        assert session.add() == 1
        with pytest.raises(RequestError, match="no rows"):
            session.step({})

    def test_image_inputs(self, session: Session) -> None:
        ids, mask = np.array([90, 90]), np.array([True, True])
        with pytest.raises(RequestError, match="image positions without embeddings"):
            session.step({0: RowInput(token_ids=ids, image_mask=mask)})
        rows = np.zeros((2, 31), dtype=np.float32)
        with pytest.raises(RequestError, match=r"shape \[2, 31\]; expected \[2, 32\]"):
            session.step({0: RowInput(token_ids=ids, image_mask=mask, image_embeddings=rows)})
        with pytest.raises(RequestError, match="image mask of another shape"):
            session.step({0: RowInput(token_ids=ids, image_mask=mask[:1], image_embeddings=rows)})
