"""`Engine`: an opened model that any number of sessions share and none changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.limits import symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.engram_store import EngramStore
from engram_trt.runtime.stage_runners.contract import Backend, StageRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Stages loaded by a back end.

    Args:
        config: facts of the model.
        deployment: limits and numerics.
        stages: the chain in order.
        backend: runs the stages.
        runners: one per stage.
        engram_store: has the Engram tables that the back end does not hold itself; closed with the engine.
    """

    config: ModelConfig
    deployment: DeploymentConfig
    stages: tuple[StageSpec, ...]
    backend: Backend
    runners: tuple[StageRunner, ...] = field(repr=False)
    engram_store: EngramStore | None = None

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
        return cls(
            config=config,
            deployment=deployment,
            stages=tuple(stages),
            backend=backend,
            runners=tuple(backend.load(spec) for spec in stages),
            engram_store=engram_store,
        )

    @property
    def symbol_limits(self) -> Mapping[str, int]:
        """Largest value of every symbol in the stages' shapes."""
        return symbol_limits(self.config, self.deployment.limits)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        if self.engram_store is not None:
            self.engram_store.close()
