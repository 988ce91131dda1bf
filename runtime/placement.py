"""Which stages run on which device: read from a deployment, or balanced by bytes and floor times.

The chain is cut only where little travels (`free_boundaries`): streams, reading mix, rotary tables and Engram ids.
Caches and lists that several layers share stay inside one range, and so on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import DeploymentError
from engram_trt.configs.layers import free_boundaries
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec

FLOORS: Mapping[str, tuple[float, float]] = {"cpu": (1e10, 3e-4), "cuda": (3e12, 1e-5)}
"""Device kind -> bytes it reads per second and seconds of a stage that reads none: orders of magnitude, to compare
stages with each other, not to foretell a step."""

LISTS = ("topk_indices", "candidate_blocks")
"""Activations that layers of one group hand to each other; no cut may lie between writer and reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage holds, and what a decode step reads of it.

    Args:
        held_bytes: weights, bound tables and caches.
        read_bytes: weights that one token needs; of routed experts only the activated ones.
    """

    held_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStages:
    """Consecutive stages of one device."""

    device: str
    stages: tuple[StageSpec, ...]


def pieces_of(stages: Sequence[StageSpec], config: ModelConfig) -> tuple[tuple[StageSpec, ...], ...]:
    """The chain cut at every legal boundary: no piece can be divided further.

    Raises:
        ValueError: a stage would read a cache or list of another piece.
    """
    boundaries = set(free_boundaries(config))
    pieces: list[list[StageSpec]] = [[]]
    for position, stage in enumerate(stages):
        before = None if position == 0 else stages[position - 1].layer_id
        is_head = stage.layer_id is None and before is not None
        if is_head or (stage.layer_id in boundaries and before not in (None, stage.layer_id)):
            pieces.append([])
        pieces[-1].append(stage)
    for number, piece in enumerate(pieces):
        later = [stage for other in pieces[number + 1 :] for stage in other]
        shared = crossing_state(piece, later)
        if shared:
            raise ValueError(f"{', '.join(shared)} would cross the boundary before {later[0].name}")
    return tuple(tuple(piece) for piece in pieces)


def crossing_state(before: Sequence[StageSpec], after: Sequence[StageSpec]) -> tuple[str, ...]:
    """Keys of caches and lists that stages on both sides of a cut use."""

    def shared(stages: Sequence[StageSpec]) -> set[str]:
        specs = [spec for stage in stages for spec in (*stage.inputs, *stage.outputs)]
        return {spec.key for spec in specs if spec.role == "state"}

    written = {spec.key for stage in before for spec in stage.outputs if spec.key in LISTS}
    awaited: set[str] = set()
    for stage in reversed(after):
        awaited -= {spec.key for spec in stage.outputs}
        awaited |= {spec.key for spec in stage.inputs}
    return tuple(sorted((shared(before) & shared(after)) | (written & awaited)))


def stage_cost(
    stage: StageSpec, config: ModelConfig, sizes: Mapping[str, int], weight_bytes: int, table_bytes: int = 0
) -> StageCost:
    """Bytes of one stage.

    Args:
        stage: its interface.
        config: says how many experts a token activates.
        sizes: largest value of every symbol; `table_rows` may be missing.
        weight_bytes: of its dense weights.
        table_bytes: of an Engram table that is bound whole.
    """
    known = {"table_rows": 0, EXPERTS: config.n_routed_experts, **sizes}
    experts = sum(t.num_bytes(known) for t in stage.inputs if t.role == "resident")
    caches = sum(t.num_bytes(known) for t in stage.outputs if t.role == "state")
    active = experts * config.n_activated_experts // max(config.n_routed_experts, 1)
    return StageCost(held_bytes=weight_bytes + experts + caches + table_bytes, read_bytes=weight_bytes + active)


def floor_seconds(costs: Sequence[StageCost], device: str) -> float:
    """The least time that a decode step spends in some stages of one device."""
    bytes_per_second, per_stage = FLOORS[device.partition(":")[0]]
    return sum(cost.read_bytes for cost in costs) / bytes_per_second + per_stage * len(costs)


def place(
    stages: Sequence[StageSpec], config: ModelConfig, deployment: DeploymentConfig, costs: Mapping[str, StageCost]
) -> tuple[PlacedStages, ...]:
    """One range of stages for each of the deployment's devices, in order.

    Args:
        stages: the whole chain.
        config, deployment: the model, and the choices of the operator.
        costs: stage name -> its cost; used where the deployment does not place the layers itself.

    Raises:
        DeploymentError: more devices than pieces, or stages that do not fit the model.
    """
    deployment.require_fits(config)
    pieces = pieces_of(stages, config)
    devices = deployment.devices
    if len(devices) > len(pieces):
        raise DeploymentError(
            "devices",
            found=f"{len(devices)} devices",
            expected=f"at most {len(pieces)}: the chain may be cut in {len(pieces) - 1} places",
            remedy="Name fewer devices, or start fewer processes.",
        )
    if deployment.stages:
        return _as_deployed(stages, deployment)
    cuts = _balanced_cuts(pieces, devices, costs)
    placed = []
    for device, start, stop in zip(devices, cuts[:-1], cuts[1:], strict=True):
        inside = tuple(stage for piece in pieces[start:stop] for stage in piece)
        placed.append(PlacedStages(device=device, stages=inside))
    return tuple(placed)


def _as_deployed(stages: Sequence[StageSpec], deployment: DeploymentConfig) -> tuple[PlacedStages, ...]:
    of_layer = {
        layer_id: entry.device
        for entry in deployment.stages
        if entry.layers
        for layer_id in range(entry.layers[0], entry.layers[1] + 1)
    }
    groups: dict[str, list[StageSpec]] = {device: [] for device in deployment.devices}
    device = deployment.stages[0].device
    for stage in stages:
        if stage.layer_id is not None:
            device = of_layer[stage.layer_id]
        elif of_layer and groups[device] and groups[device][-1].layer_id is not None:
            device = deployment.stages[-1].device
        groups[device].append(stage)
    return tuple(PlacedStages(device=name, stages=tuple(group)) for name, group in groups.items())


def _balanced_cuts(
    pieces: Sequence[Sequence[StageSpec]], devices: Sequence[str], costs: Mapping[str, StageCost]
) -> tuple[int, ...]:
    """Piece numbers where each device's range starts, and the end.

    The slowest device is as fast as it can be; among equals, the fullest one holds the least. Piece counts are
    small (five, six), so every choice is looked at, shared beginnings once.
    """

    def cost_of(device: str, start: int, stop: int) -> tuple[float, int]:
        found = [costs[stage.name] for piece in pieces[start:stop] for stage in piece]
        return floor_seconds(found, device), sum(cost.held_bytes for cost in found)

    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, (0,))}
    for number, device in enumerate(devices):
        left = len(devices) - number - 1
        reached: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for start, (slowest, fullest, cuts) in best.items():
            for stop in range(start + 1, len(pieces) - left + 1):
                seconds, held = cost_of(device, start, stop)
                option = (max(slowest, seconds), max(fullest, held), (*cuts, stop))
                if stop not in reached or option < reached[stop]:
                    reached[stop] = option
        best = reached
    return best[len(pieces)][2]
