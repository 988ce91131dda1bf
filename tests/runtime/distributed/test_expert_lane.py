"""Experts over ranks, without a network: the bits of one device, from several homes at once, and strange requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_lanes import lanes_between
from small_model import RandomSource, small_config, small_engine, small_token_map

from engram_trt.configs.errors import ClusterError
from engram_trt.configs.tensors import EXPERTS
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.torch_runner import TorchBackend
from engram_trt.runtime.distributed.expert_lane import AllToAll, LaneLayouts
from engram_trt.runtime.distributed.rank_experts import RankExperts
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.experts.device_share import DeviceShare
from engram_trt.runtime.experts.parcels import expert_shares
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.session import Session

torch.set_num_threads(1)
CONFIG = small_config()
IDS = [int(token) for token in np.random.default_rng(4).integers(3, 90, 40)]
DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def logits(engine: Engine, start: int = 0) -> np.ndarray:
    """A prompt with two rows and some tokens behind it."""
    session = Session(engine)
    first, second = session.add(), session.add()
    out = [session.prefill(first, IDS[start : start + 20], "all"), session.prefill(second, IDS[:3], "all")]
    for token in IDS[20:26]:
        out += [values[None] for values in session.step({first: [token], second: [token + 1]}).values()]
    return np.concatenate(out)


@contextmanager
def spread(split: Engine, holders: tuple[int, ...], homes: tuple[int, ...]) -> Iterator[dict[int, Engine]]:
    """Engines of several ranks, each with all layers, whose experts are shared by some of the ranks."""
    deployment = replace(split.deployment, devices=DEVICES, experts=tuple(DEVICES[rank] for rank in holders))
    shares = expert_shares(CONFIG.n_routed_experts, len(holders))
    placed = [PlacedStages(device="cpu", stages=split.stages if rank in homes else ()) for rank in range(3)]
    limits, failures = dict(split.symbol_limits), list[Exception]()
    ranks, engines = {}, {}
    lanes = {home: lanes_between(tuple(sorted({home, *holders}))) for home in homes}
    for rank in range(3):
        share = shares[holders.index(rank)] if rank in holders else None
        backend = TorchBackend(RandomSource(CONFIG), ComputeConfig(), small_token_map(CONFIG), share)
        ranks[rank] = RankExperts(deployment, placed, CONFIG.n_routed_experts, limits, rank, backend)
        if rank in homes:
            groups = {"cpu": ranks[rank].group}
            engines[rank] = Engine.load_placed(
                CONFIG, deployment, [placed[rank]], {"cpu": backend}, expert_groups=groups
            )
    for rank, experts in ranks.items():
        order = iter(homes)

        def connect(members: tuple[int, ...], rank: int = rank, order: Iterator[int] = order) -> AllToAll | None:
            ends = lanes[next(order)]
            assert members == tuple(sorted(ends))
            return ends.get(rank)

        experts.connect(connect, failures.append)
    yield engines
    ends = [threading.Thread(target=experts.end) for experts in ranks.values()]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not failures


@pytest.fixture(scope="module")
def whole() -> Engine:
    return small_engine(CONFIG)


@pytest.fixture(scope="module")
def split() -> Engine:
    return small_engine(CONFIG, experts=("cpu",))


@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1), (1, 2), (2, 0, 1)])
def test_every_spread_gives_the_bits_of_one_device(whole: Engine, split: Engine, holders: tuple[int, ...]) -> None:
    expected = logits(whole)
    with spread(split, holders, (0,)) as engines:
        found = logits(engines[0])
    np.testing.assert_array_equal(found, expected)


def test_ranks_that_ask_each_other_at_the_same_time(whole: Engine, split: Engine) -> None:
    expected = [logits(whole, start) for start in (0, 5, 10)]
    with spread(split, (0, 1, 2), (0, 1, 2)) as engines, ThreadPoolExecutor(3) as pool:
        starts = {0: 0, 1: 5, 2: 10}
        found = list(pool.map(lambda rank: _single_threaded(engines[rank], starts[rank]), engines))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def _single_threaded(engine: Engine, start: int) -> np.ndarray:
    torch.set_num_threads(1)
    return logits(engine, start)


def test_a_failure_at_home_leaves_the_lane_in_step(
    whole: Engine, split: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is undone, the answers of the others are taken, and the next step is right."""
    expected = logits(whole)
    with spread(split, (0, 1), (0,)) as engines:
        own, failures = DeviceShare.run, [MemoryError("no room")]

        def run(self: DeviceShare, *arguments: Any) -> np.ndarray:
            if self.backend is engines[0].backend and failures:
                raise failures.pop()
            return own(self, *arguments)

        monkeypatch.setattr(DeviceShare, "run", run)
        with pytest.raises(MemoryError, match="no room"):
            logits(engines[0])
        np.testing.assert_array_equal(logits(engines[0]), expected)


@pytest.mark.parametrize(
    "header",
    [
        (1, 99, 1, 1, 1, 1),
        (1, 0, 4, 1, 1, 1),
        (1, 0, 1, 13, 1, 1),
        (1, 0, 1, 2, 3, 3),
        (1, 0, 1, 2, 2, 1),
        (1, 0, 1, 2, 2, 2 * CONFIG.n_activated_experts + 1),
        (7, 0, 1, 1, 1, 1),
        (1, 0, 1, 1, -1, 0),
    ],
)
def test_a_request_that_no_rank_would_send_is_refused(split: Engine, header: tuple[int, ...]) -> None:
    stages = [stage for stage in split.stages if stage.kind == EXPERTS]
    layouts = LaneLayouts(stages, split.symbol_limits)
    layouts.check(np.array([1, len(stages) - 1, 3, 12, 36, 36]))
    with pytest.raises(ClusterError, match="a request for experts"):
        layouts.check(np.array(header))
