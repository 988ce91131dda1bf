"""One step's worth of bound stages for one set of shapes, on one device or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

from engram_trt.configs.tensors import TensorSpec
from engram_trt.runtime.device_threads import DeviceThread
from engram_trt.runtime.engram.staging import EngramStaging
from engram_trt.runtime.stage_runners.contract import Array, Backend, Run, StageRunner, View
from engram_trt.runtime.state import SessionBuffers
from engram_trt.runtime.timeline import Timeline

MAX_BOUND_CHAINS = 16
"""Shapes kept bound at once; a further one replaces the one unused longest."""

CONSTANT_INPUTS = "visible_entries"
"""Step tensors of this name never change: they are filled when a session opens."""

Chain = TypeVar("Chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundChain:
    """Stages bound to buffers.

    Args:
        runs: (stage name, function) in order.
        inputs: by key, what comes from outside: step tensors, for the session to fill, and, where the chain is a
            part of one, what the part before it puts out.
        outputs: last version of every tensor a stage put out, by key.
        views: stage -> what its inputs and outputs are bound to, for comparisons.
        threads: run -> the thread of its device; others run where the step was started.
        finish: what remains to be done, in order, by the one who waits for the step.
        timeline: records every run while it is on.
    """

    runs: tuple[tuple[str, Run], ...]
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]
    views: Mapping[str, Mapping[str, View]]
    threads: Mapping[str, DeviceThread] = field(default_factory=dict)
    finish: tuple[tuple[str, Run], ...] = ()
    timeline: Timeline | None = None

    def run(self, stage_seconds: dict[str, float]) -> None:
        """Run all stages; `stage_seconds` receives the time of each."""
        self.start(stage_seconds)()

    def start(self, stage_seconds: dict[str, float]) -> Run:
        """Begin a step. On device threads and in other processes it goes on by itself.

        Returns:
            a function to be called once, which waits for the end and raises what a stage raised.
        """
        if not self.threads:
            self._run_all(self.runs, stage_seconds, "")
            return lambda: self._run_all(self.finish, stage_seconds, "")
        ended: Future[None] = Future()
        groups = [(thread, tuple(runs)) for thread, runs in groupby(self.runs, lambda run: self.threads.get(run[0]))]

        def run_group(number: int) -> None:
            thread, runs = groups[number]
            try:
                self._run_all(runs, stage_seconds, "" if thread is None else thread.device)
                if number + 1 == len(groups):
                    ended.set_result(None)
                else:
                    hand_over(number + 1)
            except BaseException as error:  # noqa: BLE001 - raised where the step is waited for
                ended.set_exception(error)

        def hand_over(number: int) -> None:
            thread = groups[number][0]
            if thread is None:
                run_group(number)
            else:
                thread.submit(lambda: run_group(number))

        def wait() -> None:
            ended.result()
            self._run_all(self.finish, stage_seconds, "")

        hand_over(0)
        return wait

    def _run_all(self, runs: Sequence[tuple[str, Run]], stage_seconds: dict[str, float], track: str) -> None:
        for name, run in runs:
            started = perf_counter_ns()
            run()
            ended = perf_counter_ns()
            stage_seconds[name] = (ended - started) / 1e9
            if self.timeline is not None and self.timeline.is_on:
                self.timeline.add(name, track, started, ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Stages of a chain on one device, and the session's tensors there.

    Args:
        backend: supplies resident weights.
        runners: consecutive stages.
        buffers: places of one back end share them.
        thread: of a device that has one.
    """

    backend: Backend
    runners: tuple[StageRunner, ...]
    buffers: SessionBuffers
    thread: DeviceThread | None = None


class SessionChain(ABC):
    """The tensors of one session wherever its stages run, and the way to bind the stages to them."""

    engram: EngramStaging | None
    """Fetches Engram rows and counts them; None where the back end has all tables bound whole."""

    @property
    @abstractmethod
    def buffers(self) -> SessionBuffers:
        """Tensors of the first device."""

    @abstractmethod
    def bind(self, sizes: Mapping[str, int]) -> BoundChain:
        """Bind every stage; `sizes` has the value of every symbol in this step."""

    @abstractmethod
    def save_row(self, row: int, num_tokens: int) -> dict[str, Array]:
        """See `SessionBuffers.save_row`, of all devices."""

    @abstractmethod
    def load_row(self, row: int, num_tokens: int, saved: Mapping[str, Array]) -> None:
        """See `SessionBuffers.load_row`."""


def remembered(kept: dict[tuple[int, ...], Chain], key: tuple[int, ...], make: Callable[[], Chain]) -> Chain:
    """The bound chain of a shape, made if it is not kept; decoding repeats its shapes."""
    chain = kept.pop(key) if key in kept else make()
    while len(kept) >= MAX_BOUND_CHAINS:
        del kept[next(iter(kept))]
    kept[key] = chain  # last in order: most recently used
    return chain


def bind_chain(
    places: Sequence[Place],
    sizes: Mapping[str, int],
    staging: EngramStaging | None = None,
    timeline: Timeline | None = None,
) -> BoundChain:
    """Bind every stage at the given sizes; tensors move between devices just before a stage there reads them.

    Args:
        places: the chain in order, or a part of it.
        sizes: value of every symbol in this step.
        staging: fetches Engram rows between the stages, if some table is not bound whole.
        timeline: for `BoundChain`.
    """
    binding = _Binding(sizes, staging)
    for place in places:
        for runner in place.runners:
            binding.add(place, runner)
    incoming = None if staging is None else staging.fetch_incoming(binding.inputs)
    runs = binding.runs if incoming is None else [("fetch", incoming), *binding.runs]
    return BoundChain(
        runs=tuple(runs),
        inputs=binding.inputs,
        outputs=binding.outputs,
        views=binding.views,
        threads=binding.threads,
        timeline=timeline,
    )


class _Binding:
    """A chain on the way to being bound: where the last version of every tensor is."""

    def __init__(self, sizes: Mapping[str, int], staging: EngramStaging | None) -> None:
        self.sizes, self.staging = sizes, staging
        self.inputs: dict[str, View] = {}
        self.outputs: dict[str, View] = {}
        self.views: dict[str, Mapping[str, View]] = {}
        self.runs: list[tuple[str, Run]] = []
        self.threads: dict[str, DeviceThread] = {}
        self._latest: dict[str, View] = {}
        self._turns: dict[tuple[int, str], int] = {}

    def add(self, place: Place, runner: StageRunner) -> None:
        """Bind one stage after those before it."""
        stage, first = runner.spec, len(self.runs)
        views = {} if self.staging is None else self.staging.views(stage, self.sizes)
        for spec in stage.inputs:
            if spec.role == "resident" and spec.name not in views:
                views[spec.name] = place.backend.resident(stage, spec.name)
            elif spec.role != "resident":
                view = self._input(place, spec, is_bound=spec.name not in views)
                views.setdefault(spec.name, view)
        before = None if self.staging is None else self.staging.wait_run(stage, views)
        read = {spec.key for spec in stage.inputs}
        for spec in stage.outputs:
            turn = (id(place.buffers), spec.key)
            if spec.alias is None and spec.key in read:
                self._turns[turn] = self._turns.get(turn, 0) + 1
            views[spec.name] = self._latest[spec.key] = self.outputs[spec.key] = self._current(place, spec)
        self.views[stage.name] = views
        after = None if self.staging is None else self.staging.fetch_run(stage, self.outputs)
        named = ((f"{stage.name}:wait", before), (stage.name, runner.bind(views)), ("fetch", after))
        self.runs += [(name, run) for name, run in named if run is not None]
        if place.thread is not None:
            self.threads |= {name: place.thread for name, _ in self.runs[first:]}

    def _current(self, place: Place, spec: TensorSpec) -> View:
        return place.buffers.view(spec, self.sizes, self._turns.get((id(place.buffers), spec.key), 0))

    def _input(self, place: Place, spec: TensorSpec, *, is_bound: bool) -> View:
        """The tensor on this device; what is elsewhere is brought here first."""
        view = self._current(place, spec)
        if spec.role == "state" or spec.name.startswith(CONSTANT_INPUTS):
            return view
        source = self._latest.get(spec.key)
        if source is None:
            self.inputs[spec.key] = self._latest[spec.key] = view
        elif source.buffer is not view.buffer and is_bound:
            self.runs.append((f"{spec.key}:transfer", place.backend.transfer(source, view)))
            self._latest[spec.key] = view
        return view


def constant_values(size: int) -> Array:
    """Values of the constant inputs: entry numbers."""
    return np.arange(size, dtype=np.int64)
