"""`Engine`: an opened model that any number of sessions share and none changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.limits import symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, ITEM_BYTES, StageSpec
from engram_trt.runtime.device_threads import DeviceThread, core_of
from engram_trt.runtime.engram.staging import ROWS, SCALES
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.experts.spread import ExpertGroup, SpreadExperts
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.stage_runners.contract import Backend, StageRunner
from engram_trt.runtime.timeline import Timeline

if TYPE_CHECKING:
    from engram_trt.runtime.execution import SessionChain


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReady:
    """Loading of one stage.

    Attributes:
        stage: its name.
        seconds: until it could be bound, its experts included.
        resident_bytes: experts bound; mapped ones are read when they are first chosen.
    """

    stage: str
    seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """Stages on one device.

    Args:
        device: its name.
        backend: runs the stages; several devices of a host may share one.
        runners: one per stage, in order.
        thread: where they run, for a device that has a thread of its own.
        ready: how long each stage took to load.
    """

    device: str
    backend: Backend
    runners: tuple[StageRunner, ...] = field(repr=False)
    thread: DeviceThread | None = None
    ready: tuple[StageReady, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Stages loaded by a back end.

    Args:
        config: facts of the model.
        deployment: limits and numerics.
        stages: the whole chain in order.
        parts: the stages of this process, device by device.
        engram_store: has the Engram tables that the back end does not hold itself; closed with the engine.
        expert_groups: share the routed experts of the layers, where they are spread over devices; closed likewise.
        open_chain: makes a session's chain where some stages are in other processes; None where all are here.
        timeline: records when stages ran, while it is on.
    """

    config: ModelConfig
    deployment: DeploymentConfig
    stages: tuple[StageSpec, ...]
    parts: tuple[EnginePart, ...]
    engram_store: EngramStore | None = None
    expert_groups: tuple[ExpertGroup, ...] = ()
    open_chain: Callable[[Engine, Mapping[str, int]], SessionChain] | None = None
    timeline: Timeline = field(default_factory=Timeline, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        deployment: DeploymentConfig,
        stages: Sequence[StageSpec],
        backend: Backend,
        engram_store: EngramStore | None = None,
    ) -> Engine:
        """Open every stage with a back end."""
        placed = (PlacedStages(device=deployment.devices[0], stages=tuple(stages)),)
        runners, ready = _load(backend, placed[0])
        parts = (EnginePart(device=placed[0].device, backend=backend, runners=runners, ready=ready),)
        return cls(config=config, deployment=deployment, stages=tuple(stages), parts=parts, engram_store=engram_store)

    @classmethod
    def load_placed(
        cls,
        config: ModelConfig,
        deployment: DeploymentConfig,
        placed: Sequence[PlacedStages],
        backends: Mapping[str, Backend],
        engram_store: EngramStore | None = None,
        expert_groups: Mapping[str, ExpertGroup] | None = None,
    ) -> Engine:
        """Open every stage on its device.

        Args:
            config, deployment, engram_store: as for the class.
            placed: the chain, device by device.
            backends: device -> its back end.
            expert_groups: device -> who runs the routed experts of its layers, if not the device alone.

        Raises:
            DeploymentError: a core that this process may not run on.
        """
        threads = {p.device: DeviceThread(p.device) for p in placed if core_of(p.device) is not None}
        parts, groups = [], expert_groups or {}
        for range_ in placed:
            backend = backends[range_.device]
            runners, ready = _load(backend, range_, groups.get(range_.device))
            thread = threads.get(range_.device)
            parts.append(EnginePart(device=range_.device, backend=backend, runners=runners, thread=thread, ready=ready))
        stages = tuple(stage for range_ in placed for stage in range_.stages)
        return cls(
            config=config,
            deployment=deployment,
            stages=stages,
            parts=tuple(parts),
            engram_store=engram_store,
            expert_groups=tuple(groups.values()),
        )

    @property
    def backend(self) -> Backend:
        """Of the first device."""
        return self.parts[0].backend

    @property
    def runners(self) -> tuple[StageRunner, ...]:
        """All stages of this process."""
        return tuple(runner for part in self.parts for runner in part.runners)

    @property
    def ready(self) -> tuple[StageReady, ...]:
        """Loading time and bound experts of every stage of this process."""
        return tuple(stage for part in self.parts for stage in part.ready)

    @property
    def symbol_limits(self) -> Mapping[str, int]:
        """Largest value of every symbol in the stages' shapes."""
        return symbol_limits(self.config, self.deployment.limits)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            if part.thread is not None:
                part.thread.close()
        for group in self.expert_groups:
            group.close()
        for backend in {id(part.backend): part.backend for part in self.parts}.values():
            backend.close()
        if self.engram_store is not None:
            self.engram_store.close()


def _load(
    backend: Backend, placed: PlacedStages, group: ExpertGroup | None = None
) -> tuple[tuple[StageRunner, ...], tuple[StageReady, ...]]:
    """Open stages and bind their experts, so that the first step waits for neither."""
    runners: list[StageRunner] = []
    ready = []
    for spec in placed.stages:
        started = perf_counter()
        if group is not None and spec.kind == EXPERTS:
            runners.append(SpreadExperts(spec, group))
            num_bytes = group.num_bytes(spec.name)
        else:
            runners.append(backend.load(spec))
            num_bytes = _bind_experts(backend, spec)
        ready.append(StageReady(stage=spec.name, seconds=perf_counter() - started, resident_bytes=num_bytes))
    return tuple(runners), tuple(ready)


def _bind_experts(backend: Backend, spec: StageSpec) -> int:
    """Bytes of the experts that a stage now has."""
    experts = [t for t in spec.inputs if t.role == "resident" and t.tensor not in (ROWS, SCALES)]
    return sum(math.prod(backend.resident(spec, t.name).shape) * ITEM_BYTES[t.dtype] for t in experts)
