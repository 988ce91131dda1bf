"""The chain over several ranks, without a network: the bits of one rank, whatever is fed, saved, undone or dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
import torch
from queue_ring import arrays_equal, placements, ring_engine
from small_model import small_config, small_engine

from engram_trt.configs.errors import PeerError
from engram_trt.runtime.distributed.chain import Ring
from engram_trt.runtime.distributed.worker import Worker
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.generation import Generation, GenerationConfig, generate_together
from engram_trt.runtime.session import Session
from engram_trt.runtime.step_inputs import RowInput

torch.set_num_threads(1)
IDS = [int(token) for token in np.random.default_rng(4).integers(3, 90, 40)]


@pytest.fixture(scope="module")
def whole() -> Engine:
    """The small model with taps before a layer of the second and of the third piece."""
    changes = {"dspark_block_size": 2, "n_mtp_layers": 1, "dspark_target_layer_ids": [3, 6], "dspark_markov_rank": 32}
    return small_engine(small_config(**changes, dspark_noise_token_id=1), dspark_taps=True)


def story(session: Session) -> list[np.ndarray]:
    """Two rows through prefill, decode, image, rollback, save and restore; everything that comes out."""
    first, second = session.add(), session.add()
    out = [session.prefill(first, IDS[:20], "all")]
    mask = np.zeros(6, dtype=np.bool_)
    mask[2:5] = True
    ids = np.array(IDS[:6])
    ids[mask] = 90
    rows = np.random.default_rng(1).standard_normal((6, 32)).astype(np.float32)
    image = RowInput(token_ids=ids, image_mask=mask, image_embeddings=rows)
    out += session.step({first: [7], second: image}, "all").values()
    out += session.taps.values()
    session.rollback(first, 4)
    out += session.step({first: IDS[20:23]}).values()
    saved = session.snapshot(first)
    session.finish(first)
    again = session.restore(saved)
    out += session.step({again: [9], second: [5]}).values()
    out += session.taps.values()
    return out


def test_every_placement_gives_the_same_bits(whole: Engine) -> None:
    expected = story(Session(whole))
    assert sum(array.size for array in expected) > 1000
    found = placements(whole, 3)
    assert len(found) == 7
    for placed in found[1:]:
        with ring_engine(whole, placed) as engine:
            got = story(Session(engine))
        cuts = [range_.stages[0].name for range_ in placed]
        assert all(arrays_equal(*pair) for pair in zip(got, expected, strict=True)), cuts


def test_every_placement_of_tiny_gives_the_same_bits(exported: Engine) -> None:
    """Under ONNX Runtime: rows of every cache are longer than window, top-k and candidate population."""
    ids = [int(token) for token in np.random.default_rng(0).integers(3, 1024, 132)]

    def run(engine: Engine) -> np.ndarray:
        session = Session(engine)
        row = session.add()
        parts = [session.prefill(row, ids[:130], "all")]
        return np.concatenate([*parts, *(session.step({row: [token]})[row][None] for token in ids[130:])])

    expected = run(exported)
    found = placements(exported, 3)
    assert len(found) == 11
    for placed in found[1:]:
        with ring_engine(exported, placed) as engine:
            assert arrays_equal(run(engine), expected), [range_.stages[0].name for range_ in placed]


def test_sequences_in_flight_do_not_mix(whole: Engine) -> None:
    prompts, config = [IDS[:14], IDS[3:9], [5]], GenerationConfig(max_tokens=4, ignore_eos=True)
    alone = [list(Generation(Session(whole, max_batch=1), prompt, config)) for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert generate_together(whole, prompts, config) == alone
    with ring_engine(whole, placements(whole, 3)[-1]) as engine:
        assert generate_together(engine, prompts, config) == alone


def test_a_step_that_nobody_waits_for_is_undone(whole: Engine) -> None:
    """As when Ctrl-C comes between sending and receiving: the late answer must not be taken for the next one."""
    untouched = Session(whole)
    row = untouched.add()
    untouched.prefill(row, IDS[:11])
    expected = untouched.step({row: IDS[11:14]}, "all")[row]
    with ring_engine(whole, placements(whole, 3)[-1]) as engine:
        session, other = Session(engine), Session(engine)
        row = session.add()
        session.prefill(row, IDS[:11])
        session.start({row: [8, 8, 8, 8]}, "all")
        other.step({other.add(): [3]})
        assert session.length(row) == 11
        assert arrays_equal(session.step({row: IDS[11:14]}, "all")[row], expected)


def test_a_session_that_is_gone_is_closed_everywhere(whole: Engine) -> None:
    workers: list[Worker] = []
    with ring_engine(whole, placements(whole, 3)[-1], workers=workers) as engine:
        for _ in range(3):
            session = Session(engine)
            session.step({session.add(): [3]})
            del session
        kept = Session(engine)
        kept.step({kept.add(): [4]})
        assert [len(worker._chains) for worker in workers] == [1, 1]


def test_a_session_that_survives_a_loss_is_the_one_before_the_step(whole: Engine) -> None:
    lost = PeerError("rank 0: rank 1", kind="lost", found="silence", expected="a beat", remedy="Start again.")
    rings: list[Ring] = []
    with ring_engine(whole, placements(whole, 3)[-1], rings=rings) as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: IDS[:5]})
        wait = session.start({row: [7]})
        before = session._rows
        rings[0]._pending[max(rings[0]._pending)].answer.result(timeout=20).give_back()
        rings[0].collect = _raise(lost)  # type: ignore[method-assign]
        with pytest.raises(PeerError):
            wait()
        assert session._rows is before
        rings[0].fail(lost)
        with pytest.raises(PeerError, match="silence"):
            session.step({row: [8]})
        assert session._rows is before
        assert session.length(row) == 5


def _raise(error: Exception) -> Callable[[object], NoReturn]:
    def collect(answer: object) -> NoReturn:
        raise error

    return collect


def test_a_snapshot_of_other_limits_is_refused(whole: Engine) -> None:
    with ring_engine(whole, placements(whole, 2)[-1]) as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [3, 4]})
        saved = session.snapshot(row)
        name = next(iter(saved.states))
        saved.states[name] = saved.states[name][:-1]
        with pytest.raises(ValueError, match="other caches"):
            session.restore(saved)
        assert session.length(row) == 2


def test_every_rank_records(whole: Engine) -> None:
    spans: list[str] = []
    with ring_engine(whole, placements(whole, 3)[-1], spans) as engine:
        session = Session(engine)
        session.step({session.add(): [3]})
    names = [{entry[0] for entry in json.loads(text)} for text in spans]
    assert any({"idle", "take", "block_04", "block_06", "send"} <= found for found in names)
    assert any({"head", "send"} <= found for found in names)
    assert len(spans) == 2
