"""Several devices of one process: pinned threads, the bits of one device, steps under way at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from queue_ring import arrays_equal, placements
from small_model import small_engine

from engram_trt.configs.errors import DeploymentError
from engram_trt.runtime.device_threads import DeviceThread, core_of, require_core
from engram_trt.runtime.engine import Engine, EnginePart
from engram_trt.runtime.generation import GenerationConfig, generate_together
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.contract import Backend

torch.set_num_threads(1)
CORES = sorted(os.sched_getaffinity(0))
IDS = [int(token) for token in np.random.default_rng(4).integers(3, 90, 30)]


@pytest.fixture(scope="module")
def whole() -> Engine:
    return small_engine()


@pytest.fixture
def threads() -> Iterator[list[DeviceThread]]:
    made = [DeviceThread(f"cpu:{CORES[number % len(CORES)]}") for number in range(3)]
    yield made
    for thread in made:
        thread.close()


def spread(
    whole: Engine,
    placed: tuple[PlacedStages, ...],
    threads: list[DeviceThread | None],
    backends: list[Backend] | None = None,
) -> Engine:
    runners = {runner.spec.name: runner for runner in whole.runners}
    parts = tuple(
        EnginePart(
            device=range_.device,
            backend=whole.backend if backends is None else backends[number],
            runners=tuple(runners[stage.name] for stage in range_.stages),
            thread=threads[number],
        )
        for number, range_ in enumerate(placed)
    )
    return replace(whole, parts=parts)


def run(engine: Engine) -> np.ndarray:
    session = Session(engine)
    row = session.add()
    parts = [session.prefill(row, IDS[:20], "all"), *(session.step({row: [t]}, "all")[row] for t in IDS[20:23])]
    saved = session.snapshot(row)
    session.finish(row)
    row = session.restore(saved)
    return np.concatenate([*parts, session.step({row: [5]}, "all")[row]])


def test_names() -> None:
    assert [core_of(name) for name in ("cpu", "cpu:3", "cuda:1")] == [None, 3, None]
    assert require_core(f"cpu:{CORES[0]}") == CORES[0]
    with pytest.raises(DeploymentError, match="'cpu:4096'; expected cpu:N with N out of"):
        require_core("cpu:4096")


def test_a_thread_runs_on_its_core_in_order(threads: list[DeviceThread]) -> None:
    seen: list[object] = []
    done = threading.Event()
    threads[0].submit(lambda: seen.append(os.sched_getaffinity(0)))
    threads[0].submit(lambda: seen.append(2))
    threads[0].submit(done.set)
    assert done.wait(20)
    assert seen == [{CORES[0]}, 2]
    assert os.sched_getaffinity(0) == set(CORES)


def test_pinned_threads_give_the_same_bits(whole: Engine, threads: list[DeviceThread]) -> None:
    expected = run(whole)
    for placed in placements(whole, 3)[::3]:
        assert arrays_equal(run(spread(whole, placed, list(threads))), expected)


def test_back_ends_with_memory_of_their_own_are_handed_what_they_read(whole: Engine) -> None:
    """As between GPUs: every device has buffers of its own, and tensors move just before they are read."""
    backends = [_Apart(whole.backend) for _ in range(3)]
    expected = run(whole)
    for placed in placements(whole, 3)[2::4]:
        engine = spread(whole, placed, [None] * 3, list(backends))
        assert arrays_equal(run(engine), expected)
        moved = [name for name, _ in Session(engine).chain.bind(dict(whole.symbol_limits)).runs if "transfer" in name]
        assert "hidden_states:transfer" in moved
        assert not [name for name in moved if "topk" in name or "candidate" in name or "_kv" in name]


class _Apart(Backend):
    """The same back end under another identity, so that nothing is shared."""

    name = "apart"

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.allocate, self.resident = inner.allocate, inner.resident  # type: ignore[method-assign]

    def allocate(self, dtype, num_elements):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def resident(self, spec, binding):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def load(self, spec):  # type: ignore[no-untyped-def]
        return self._inner.load(spec)


def test_devices_work_at_the_same_time(whole: Engine, threads: list[DeviceThread]) -> None:
    """Two sequences in flight: the first device is in a step while the second is in another's."""
    placed = placements(whole, 2)[2]
    engine = spread(whole, placed, list(threads))
    meeting = threading.Barrier(2, timeout=20)
    first, second = Session(engine, max_batch=1), Session(engine, max_batch=1)
    for session, stage in ((first, placed[1].stages[0].name), (second, placed[0].stages[0].name)):
        session.step({session.add(): IDS[:3]})
        row = {0: [IDS[3]]}
        bound = session._prepare(row, "last")[1]

        def meet(run: object) -> object:
            return lambda: (meeting.wait(), run())  # type: ignore[operator]

        runs = tuple((name, meet(run) if name == stage else run) for name, run in bound.runs)
        key = next(key for key, value in session._chains.items() if value is bound)
        session._chains[key] = replace(bound, runs=runs)  # type: ignore[arg-type]
    waits = [session.start({0: [IDS[3]]}) for session in (first, second)]
    results = [wait()[0] for wait in waits]
    assert arrays_equal(*results)


def test_a_stage_that_fails_on_a_thread_is_raised_where_the_step_is_waited_for(
    whole: Engine, threads: list[DeviceThread]
) -> None:
    engine = spread(whole, placements(whole, 3)[-1], list(threads))
    session = Session(engine)
    row = session.add()
    session.step({row: IDS[:4]})
    chain = session._prepare({row: [3]}, "last")[1]
    key = next(key for key, value in session._chains.items() if value is chain)

    def broken() -> None:
        raise ZeroDivisionError

    name = chain.runs[-1][0]
    session._chains[key] = replace(chain, runs=(*chain.runs[:-1], (name, broken)))
    wait = session.start({row: [3]})
    with pytest.raises(ZeroDivisionError):
        wait()
    assert session.length(row) == 4
    session._chains[key] = chain
    session.step({row: [3]})


def test_sequences_over_devices_are_those_of_one(whole: Engine, threads: list[DeviceThread]) -> None:
    prompts, config = [IDS[:9], [5]], GenerationConfig(max_tokens=3, ignore_eos=True)
    engine = spread(whole, placements(whole, 3)[-1], list(threads))
    assert generate_together(engine, prompts, config) == generate_together(whole, prompts, config)
