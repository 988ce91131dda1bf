"""Which stages lie on which device, and what each device holds in each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.limits import symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.export.planning.session_bytes import session_bytes
from engram_trt.export.planning.stage_bytes import StageBytes
from engram_trt.export.planning.workspaces import indexer_workspace, intermediate_bytes
from engram_trt.runtime.engram.opening import AUTO_RESIDENT_BYTES
from engram_trt.runtime.experts.parcels import expert_shares
from engram_trt.runtime.placement import pieces_of, place

PHASES = ("load", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One device.

    Attributes:
        name: as in a deployment.
        stages: on it, in order.
        phases: phase -> what -> bytes; `total` is their sum.
    """

    name: str
    stages: tuple[StageBytes, ...]
    phases: Mapping[str, Mapping[str, int]]

    @property
    def peak_bytes(self) -> int:
        """The most that any phase needs."""
        return max(phase["total"] for phase in self.phases.values())


def spread_stages(
    stages: Sequence[StageBytes], config: ModelConfig, deployment: DeploymentConfig, num_devices: int, *, gpu: bool
) -> tuple[DevicePlan, ...]:
    """Put stages on devices: as the deployment says, or cut where that is cheap, so that the fullest holds the least.

    Args:
        stages: the whole chain.
        config, deployment: the model and the operator's choices; its own placement counts if it names as many
            devices.
        num_devices: at most so many; the chain may have fewer pieces.
        gpu: devices are GPUs; one that is not is the machine's own memory.
    """
    by_name = {stage.spec.name: stage for stage in stages}
    if deployment.stages and len(deployment.devices) == num_devices:
        placed = place([stage.spec for stage in stages], config, deployment, {})
        groups = {part.device: tuple(by_name[spec.name] for spec in part.stages) for part in placed}
        devices = tuple(
            DevicePlan(name=name, stages=own, phases=device_phases(own, config, deployment, gpu=gpu))
            for name, own in groups.items()
        )
        return _with_experts_spread(devices, config, deployment)
    pieces = [tuple(by_name[spec.name] for spec in piece) for piece in pieces_of([s.spec for s in stages], config)]
    count = min(num_devices, len(pieces))

    @cache
    def phases(start: int, stop: int) -> dict[str, dict[str, int]]:
        return device_phases(group(start, stop), config, deployment, gpu=gpu)

    def group(start: int, stop: int) -> tuple[StageBytes, ...]:
        return tuple(stage for piece in pieces[start:stop] for stage in piece)

    def fullest(edges: tuple[int, ...]) -> int:
        return max(phases(*edge)[phase]["total"] for edge in pairwise(edges) for phase in PHASES)

    options: list[tuple[int, ...]] = [
        (0, *cuts, len(pieces)) for cuts in combinations(range(1, len(pieces)), count - 1)
    ]
    best = min((fullest(edges), edges) for edges in options)[1]
    devices = tuple(
        DevicePlan(name=f"cuda:{number}" if gpu else "cpu", stages=group(*edge), phases=phases(*edge))
        for number, edge in enumerate(pairwise(best))
    )
    return _with_experts_spread(devices, config, deployment)


def _with_experts_spread(
    devices: tuple[DevicePlan, ...], config: ModelConfig, deployment: DeploymentConfig
) -> tuple[DevicePlan, ...]:
    """The same devices with the experts where the deployment spreads them, if these are its devices."""
    if not deployment.spreads_experts or tuple(device.name for device in devices) != deployment.devices:
        return devices
    everything = sum(stage.expert_bytes for device in devices for stage in device.stages)
    shares = expert_shares(config.n_routed_experts, len(deployment.experts))
    held = {
        name: everything * len(share) // config.n_routed_experts
        for name, share in zip(deployment.experts, shares, strict=True)
    }
    return tuple(replace(device, phases=_with_experts(device.phases, held.get(device.name, 0))) for device in devices)


def _with_experts(phases: Mapping[str, Mapping[str, int]], num_bytes: int) -> dict[str, dict[str, int]]:
    return {
        name: {**parts, "experts": num_bytes, "total": parts["total"] - parts["experts"] + num_bytes}
        for name, parts in phases.items()
    }


def device_phases(
    stages: Sequence[StageBytes], config: ModelConfig, deployment: DeploymentConfig, *, gpu: bool
) -> dict[str, dict[str, int]]:
    """Bytes by phase and purpose on the device that has these stages.

    Buffers are allocated once at their largest size, so caches and activations are the same in both phases of a
    session; scratch memory follows the step.
    """
    limits = symbol_limits(config, deployment.limits)
    dtype = deployment.dtype
    session = session_bytes([stage.spec for stage in stages], limits)
    resident = [stage for stage in stages if stage.table_bytes and residency_of(stage, deployment) == "device"]
    held = {
        "dense_weights": sum(stage.dense_bytes for stage in stages),
        "experts": sum(stage.expert_bytes for stage in stages),
        "engram_tables": sum(stage.table_bytes for stage in resident),
    }
    fetched = [stage for stage in stages if stage.table_bytes and stage not in resident]
    fixed = held | {
        "caches": session.caches,
        "activations": session.activations,
        "engram_staging": len(fetched) * staging_bytes(config, deployment),
    }
    phases = {"load": held}
    for phase, tokens in (("prefill", limits["tokens"]), ("decode", 1)):
        sizes = {**limits, "tokens": tokens}
        rows = sizes["batch"] * tokens
        # A GPU's scratch memory is shared by all stages; ONNX Runtime gives every stage an arena of its own.
        together = max if gpu else sum
        phases[phase] = fixed | {
            "indexer_workspace": together(
                [indexer_workspace(s.spec, config, dtype, sizes, gpu=gpu) for s in stages] or [0]
            ),
            "intermediates": together([intermediate_bytes(s.spec, config, dtype, rows) for s in stages] or [0]),
        }
    return {name: {**parts, "total": sum(parts.values())} for name, parts in phases.items()}


def residency_of(stage: StageBytes, deployment: DeploymentConfig) -> str:
    """Where a stage's Engram table will be; the runtime decides `auto` by its size, and by what is free besides."""
    residency = deployment.engram.of_layer(stage.spec.layer_id or 0)
    if residency != "auto":
        return residency
    return "device" if stage.table_bytes <= AUTO_RESIDENT_BYTES else "mmap"


def staging_bytes(config: ModelConfig, deployment: DeploymentConfig) -> int:
    """Row ids, rows and scales of one fetched table in one step, as `EngramStaging` allocates them."""
    limits = deployment.limits
    num_ids = limits.max_batch * limits.max_step_tokens * config.engram_columns
    return num_ids * (ITEM_BYTES["int64"] + staged_row_bytes(config))


def staged_row_bytes(config: ModelConfig) -> int:
    """A row of a table with its scales."""
    return config.engram_head_dim + config.engram_head_dim // 32


def traffic(devices: Sequence[DevicePlan], config: ModelConfig, rows: int, batch: int) -> list[dict[str, object]]:
    """Bytes that cross from device to device in one step.

    Args:
        devices: in order.
        config: the model.
        rows: tokens of the step, over all sequences.
        batch: sequences.

    Returns:
        one entry per pair of devices: from, to, bytes, and by tensor.
    """
    sizes = {"batch": batch, "tokens": rows // batch, "selected": 1}
    home: dict[str, str] = {}
    links: dict[tuple[str, str], dict[str, int]] = {}
    for device in devices:
        for stage in device.stages:
            for tensor in stage.spec.inputs:
                source = home.get(tensor.key, device.name)
                if tensor.role == "activation" and source != device.name:
                    links.setdefault((source, device.name), {})[tensor.key] = tensor.num_bytes(sizes)
            home.update({tensor.key: device.name for tensor in stage.spec.outputs if tensor.role == "activation"})
    return [
        {"from": source, "to": target, "bytes": sum(tensors.values()), "tensors": tensors}
        for (source, target), tensors in links.items()
    ]
