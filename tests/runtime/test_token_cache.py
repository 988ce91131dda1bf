"""The token cache against a plain implementation that keeps every sequence whole, and against a real session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import small_engine

from engram_trt.plugins.engram_hash.spec import DEAD
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.token_cache import TokenCache

ROWS, HISTORY, ROLLBACK = 3, 3, 4
COMPRESSED = st.integers(-1, 50)  # -1 is an image position

operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, ROWS - 1), st.lists(COMPRESSED, min_size=1, max_size=9)),
        st.tuples(st.just("abort"), st.integers(0, ROWS - 1), st.lists(COMPRESSED, min_size=1, max_size=9)),
        st.tuples(st.just("rollback"), st.integers(0, ROWS - 1), st.integers(0, ROLLBACK)),
        st.tuples(st.just("fork"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
        st.tuples(st.just("reset"), st.integers(0, ROWS - 1), st.none()),
        st.tuples(st.just("save"), st.integers(0, ROWS - 1), st.none()),
        st.tuples(st.just("restore"), st.integers(0, ROWS - 1), st.none()),
    ),
    max_size=40,
)


class WholeHistory:
    """Every sequence as a list, with the longest it has been: what the cache stands for."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], int]] = [([], 0)] * ROWS

    def recent(self) -> list[list[int]]:
        return [([DEAD] * HISTORY + ids)[-HISTORY:] for ids, _ in self.rows]

    def append(self, row: int, ids: list[int]) -> None:
        old, longest = self.rows[row]
        self.rows[row] = old + ids, max(longest, len(old) + len(ids))

    def may_take_back(self, row: int, count: int) -> bool:
        ids, longest = self.rows[row]
        return len(ids) - count >= max(0, longest - ROLLBACK)

    def rollback(self, row: int, count: int) -> None:
        ids, longest = self.rows[row]
        self.rows[row] = ids[: len(ids) - count], longest


@settings(max_examples=300, deadline=None)
@given(operations)
def test_it_says_what_a_whole_history_says(steps: list[tuple[str, int, Any]]) -> None:
    cache, plain = TokenCache(ROWS, HISTORY, ROLLBACK), WholeHistory()
    saved = cache.snapshot(0), plain.rows[0]
    for name, row, value in steps:
        if name == "append":
            cache.append(row, np.array(value, dtype=np.int64))
            plain.append(row, value)
        elif name == "abort":
            cache.copy().append(row, np.array(value, dtype=np.int64))
        elif name == "rollback" and plain.may_take_back(row, value):
            cache.rollback(row, value)
            plain.rollback(row, value)
        elif name == "fork":
            cache.fork(row, value)
            plain.rows[value] = plain.rows[row]
        elif name == "reset":
            cache.reset(row)
            plain.rows[row] = [], 0
        elif name == "save":
            saved = cache.snapshot(row), plain.rows[row]
        elif name == "restore":
            cache.restore(row, saved[0])
            plain.rows[row] = saved[1]
        assert cache.recent(ROWS).tolist() == plain.recent()


@pytest.mark.parametrize(("history", "rollback"), [(0, 0), (0, 3), (3, 0), (1, 2)])
def test_every_size_of_look_back_works(history: int, rollback: int) -> None:
    cache = TokenCache(1, history, rollback)
    cache.append(0, np.arange(10))
    cache.rollback(0, rollback)
    left = np.arange(10 - rollback)
    assert cache.recent(1).tolist() == [left[len(left) - history :].tolist()]


def test_ids_that_are_gone_cannot_be_taken_back() -> None:
    cache = TokenCache(1, HISTORY, ROLLBACK)
    cache.append(0, np.arange(20))
    cache.rollback(0, 3)
    with pytest.raises(ValueError, match="cannot take back 2 ids; at most 1"):
        cache.rollback(0, 2)
    with pytest.raises(ValueError, match="cannot take back -1"):
        cache.rollback(0, -1)
    assert cache.recent(1).tolist() == [[14, 15, 16]]


def test_a_snapshot_of_another_size_is_refused_and_one_does_not_change() -> None:
    cache = TokenCache(2, HISTORY, ROLLBACK)
    cache.append(0, np.arange(9))
    saved = cache.snapshot(0)
    cache.append(0, np.arange(5))
    cache.restore(1, saved)
    assert cache.recent(2).tolist() == [[2, 3, 4], [6, 7, 8]]
    with pytest.raises(ValueError, match="snapshot"):
        TokenCache(1, HISTORY, ROLLBACK + 1).restore(0, saved)


# --- in a session -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 90, count)]


def state_of(session: Session, row: int) -> tuple[list[int], Any]:
    return session._rows.token_cache.recent(row + 1)[row].tolist(), session.length(row)


def _fork(session: Session, row: int) -> int:
    return session.fork(row)


def _save_and_restore(session: Session, row: int) -> int:
    saved = session.snapshot(row)
    session.step({row: tokens(9, 3)})  # must not reach the snapshot
    other = session.restore(saved)
    session.rollback(row, 3)
    return other


@pytest.mark.parametrize("branch", [_fork, _save_and_restore])
def test_a_branch_goes_on_as_its_source_and_alone(engine: Engine, branch: Callable[[Session, int], int]) -> None:
    session = Session(engine)
    source = session.add()
    session.prefill(source, tokens(1, 23))
    session.rollback(source, 2)
    copy = branch(session, source)
    assert state_of(session, copy) == state_of(session, source)
    ahead = session.step({source: tokens(2, 4)}, "all")[source]
    other = session.step({copy: tokens(3, 4)}, "all")[copy]  # nothing of it may reach the source
    session.rollback(copy, 4)
    again = session.step({copy: tokens(2, 4)}, "all")[copy]
    assert np.allclose(again, ahead, rtol=0, atol=2e-4)  # another batch shape: float noise
    assert not np.allclose(other, ahead, rtol=0, atol=1e-2)
    following = session.step({source: [7], copy: [7]})
    assert np.allclose(following[source], following[copy], rtol=0, atol=2e-4)


def test_a_snapshot_goes_on_in_another_session(engine: Engine) -> None:
    first, second = Session(engine), Session(engine)
    row = first.add()
    first.prefill(row, tokens(4, 19))
    saved = first.snapshot(row)
    expected = first.step({row: tokens(5, 2)})[row]
    assert np.array_equal(second.step({second.restore(saved): tokens(5, 2)})[0], expected)


def test_a_step_that_fails_in_the_middle_leaves_the_cache(engine: Engine) -> None:
    session = Session(engine)
    row = session.add()
    session.prefill(row, tokens(6, 11))
    before = state_of(session, row)
    chain = session._bound_chain
    calls: list[str] = []

    def broken(inputs: Any, logits: Any) -> Any:
        bound = chain(inputs, logits)

        class Broken:
            inputs, outputs = bound.inputs, bound.outputs

            @staticmethod
            def run(seconds: dict[str, float]) -> None:
                for name, run in bound.runs[: len(bound.runs) // 2]:
                    calls.append(name)
                    run()
                raise KeyboardInterrupt

        return Broken

    session._bound_chain = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.step({row: tokens(7, 3)})
    session._bound_chain = chain  # type: ignore[method-assign]
    assert "engram_hash" in calls
    assert state_of(session, row) == before
    fresh = Session(engine)
    expected = fresh.prefill(fresh.add(), tokens(6, 11) + tokens(8, 1))
    assert np.allclose(session.step({row: tokens(8, 1)})[row], expected, rtol=0, atol=2e-4)


def test_a_place_that_is_used_again_remembers_nothing(engine: Engine) -> None:
    session = Session(engine)
    session.prefill(session.add(), tokens(1, 17))
    session.finish(0)
    fresh = Session(engine)
    assert session.add() == fresh.add() == 0
    assert state_of(session, 0) == ([DEAD] * 3, 0)
    assert np.array_equal(session.prefill(0, tokens(2, 9)), fresh.prefill(0, tokens(2, 9)))
