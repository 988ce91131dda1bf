"""One step's worth of bound stages for one set of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from engram_trt.configs.tensors import TensorSpec
from engram_trt.runtime.engram_staging import EngramStaging
from engram_trt.runtime.stage_runners.contract import Backend, Run, StageRunner, View
from engram_trt.runtime.state import SessionBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundChain:
    """Stages bound to buffers.

    Args:
        runs: (stage name, function) in order.
        inputs: step tensors by key, for the session to fill.
        outputs: last version of every tensor a stage put out, by key.
        views: stage -> what its inputs and outputs are bound to, for comparisons.
    """

    runs: tuple[tuple[str, Run], ...]
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]
    views: Mapping[str, Mapping[str, View]]

    def run(self, stage_seconds: dict[str, float]) -> None:
        """Run all stages; `stage_seconds` receives the time of each."""
        for name, run in self.runs:
            started = perf_counter()
            run()
            stage_seconds[name] = perf_counter() - started


def bind_chain(
    backend: Backend,
    runners: Sequence[StageRunner],
    buffers: SessionBuffers,
    sizes: Mapping[str, int],
    staging: EngramStaging | None = None,
) -> BoundChain:
    """Bind every stage at the given sizes.

    Args:
        backend: supplies resident weights.
        runners: the chain in order.
        buffers: the session's tensors.
        sizes: value of every symbol in this step.
        staging: fetches Engram rows between the stages, if some table is not bound whole.
    """
    turns: dict[str, int] = {}
    inputs: dict[str, View] = {}
    outputs: dict[str, View] = {}
    runs: list[tuple[str, Run]] = []
    bound: dict[str, Mapping[str, View]] = {}

    def current(spec: TensorSpec) -> View:
        return buffers.view(spec, sizes, turns.get(spec.key, 0))

    for runner in runners:
        views: dict[str, View] = {} if staging is None else staging.views(runner.spec, sizes)
        for spec in runner.spec.inputs:
            if spec.name in views:
                continue
            views[spec.name] = backend.resident(runner.spec, spec.name) if spec.role == "resident" else current(spec)
            if spec.role == "step":
                inputs[spec.key] = views[spec.name]
        read = {spec.key for spec in runner.spec.inputs}
        for spec in runner.spec.outputs:
            if spec.alias is None and spec.key in read:
                turns[spec.key] = turns.get(spec.key, 0) + 1
            views[spec.name] = outputs[spec.key] = current(spec)
        bound[runner.spec.name] = views
        before = None if staging is None else staging.wait_run(runner.spec, views)
        after = None if staging is None else staging.fetch_run(runner.spec, outputs)
        named = ((f"{runner.spec.name}:wait", before), (runner.spec.name, runner.bind(views)), ("fetch", after))
        runs += [(name, run) for name, run in named if run is not None]
    return BoundChain(runs=tuple(runs), inputs=inputs, outputs=outputs, views=bound)
