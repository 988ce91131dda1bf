"""What a builder process is told, and what it answers: plain JSON, since it may be killed at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.tensors import StageSpec
from engram_trt.export.engines.profiles import Profile

RESULT_NAME, PLAN_NAME, LOG_NAME = "result.json", "stage.plan", "build.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """One plan to build.

    Args:
        backend: TensorRT's module name.
        stage: interface of a stage of the kind.
        onnx, data: its files, absolute.
        targets: compute capabilities.
        profiles: name -> range of every symbol.
        bake_weights: keep dense weights as constants.
        folder: where plan, log and result go.
        timing_cache: file to read and write; None where the backend has none.
        kernels: folder of compiled kernels, for a builder that times plugins on the GPU; None to build without.
        check_legality: whether to check the graph before the parser; off only where the parser itself is tested.
        keep_bodies: leave function bodies in the graph; on only where the check for fallbacks is tested.
    """

    backend: str
    stage: StageSpec
    onnx: str
    data: str
    targets: tuple[int, ...]
    profiles: Mapping[str, Profile]
    bake_weights: bool
    folder: str
    timing_cache: str | None = None
    kernels: str | None = None
    check_legality: bool = True
    keep_bodies: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        profiles = {name: {s: list(r) for s, r in profile.items()} for name, profile in self.profiles.items()}
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "stage": self.stage.to_json(),
            "targets": list(self.targets),
            "profiles": profiles,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EngineJob:
        """The inverse of `to_json`."""
        profiles = {
            name: {symbol: (r[0], r[1], r[2]) for symbol, r in profile.items()}
            for name, profile in document["profiles"].items()
        }
        return cls(
            **{
                **document,
                "stage": StageSpec.from_json(document["stage"]),
                "targets": tuple(document["targets"]),
                "profiles": profiles,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """What a builder reports.

    Args:
        num_layers: layers of the parsed network.
        plugin_layers: op -> plugin layers of the network.
        configured: op -> times the builder configured one.
        plan_layers: layers of the plan, all profiles together; 0 where the builder lists none.
        parse_ms, build_ms: wall time.
        activation_bytes: scratch memory a context needs, as far as the builder's log tells.
    """

    num_layers: int
    plugin_layers: Mapping[str, int]
    configured: Mapping[str, int]
    plan_layers: int
    parse_ms: float
    build_ms: float
    activation_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def job_folder(root: Path, name: str) -> Path:
    """An empty folder for one job."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder
