"""The plan: what a model needs and what it costs, as one document of plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.tensors import ITEM_BYTES, StageSpec
from engram_trt.export.planning.ceilings import ASSUMED, CPU, GPU, Ceilings
from engram_trt.export.planning.devices import DevicePlan, device_phases, residency_of, spread_stages, traffic
from engram_trt.export.planning.facts import ModelFacts
from engram_trt.export.planning.floors import MICROSECONDS, StepShape, StepWork, stage_work, total
from engram_trt.export.planning.host import build_needs, export_needs, run_needs
from engram_trt.export.planning.session_bytes import cache_rates
from engram_trt.export.planning.stage_bytes import StageBytes, chain_bytes
from engram_trt.export.stages.interfaces import chain_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        facts: the model.
        deployment: numerics, limits, residency.
        num_gpus: 0 for the CPU.
        gpu_memory, host_memory, disk: bytes that are there; None where nobody said.
        ceilings: of the devices.
    """

    facts: ModelFacts
    deployment: DeploymentConfig
    num_gpus: int
    gpu_memory: int | None = None
    host_memory: int | None = None
    disk: int | None = None
    ceilings: Ceilings | None = None

    @property
    def gpu(self) -> bool:
        return self.num_gpus > 0

    @property
    def rates(self) -> Ceilings:
        """Ceilings, assumed where nobody gave any."""
        return self.ceilings or ASSUMED[GPU if self.gpu else CPU]

    def with_limits(self, **limits: int) -> PlanRequest:
        """The same with other limits."""
        deployment = replace(self.deployment, limits=replace(self.deployment.limits, **limits))
        return replace(self, deployment=deployment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything worked out for one request."""

    request: PlanRequest
    stages: tuple[StageBytes, ...]
    devices: tuple[DevicePlan, ...]

    @classmethod
    def of(cls, request: PlanRequest, stages: tuple[StageBytes, ...] | None = None) -> Plan:
        """Work it out; `stages` are those of another plan that differs in limits, devices or residency only.

        Raises:
            DeploymentError: the deployment does not fit the model.
        """
        config, deployment = request.facts.config, request.deployment
        deployment.require_fits(config)
        if stages is None:
            stages = chain_bytes(_specs(request), config, deployment.dtype)
        devices = spread_stages(stages, config, deployment, max(request.num_gpus, 1), gpu=request.gpu)
        return cls(request=request, stages=stages, devices=devices)

    def with_smaller(self, request: PlanRequest) -> Plan:
        """The same stages on the same devices, with smaller limits or tables fetched.

        Devices that have room as it is keep their figures, which are then too high: they have room all the more.
        """
        config, deployment = request.facts.config, request.deployment
        devices = tuple(
            replace(device, phases=device_phases(device.stages, config, deployment, gpu=request.gpu))
            if request.gpu_memory is None or device.peak_bytes > request.gpu_memory
            else device
            for device in self.devices
        )
        return Plan(request=request, stages=self.stages, devices=devices)

    def host(self) -> dict[str, int]:
        """Host memory while the model runs."""
        request = self.request
        return run_needs(self.devices, request.facts.config, request.deployment, gpu=request.gpu)

    def export(self) -> dict[str, int]:
        """Host memory and disk of the export."""
        stored = sum(s.stored_bytes - s.expert_bytes - s.table_bytes for s in self.stages)
        return export_needs(self.stages, num_tensors=self.request.facts.tensors, copied_bytes=stored)

    def work(self, stages: Sequence[StageBytes], step: StepShape) -> StepWork:
        """Of some stages in one step."""
        config, dtype = self.request.facts.config, self.request.deployment.dtype
        return total(stage_work(stage, config, dtype, step) for stage in stages)

    def to_json(self) -> dict[str, Any]:
        """The document."""
        request, config = self.request, self.request.facts.config
        limits = request.deployment.limits
        rates = cache_rates(config, request.deployment.dtype)
        decode = StepShape(batch=limits.max_batch, tokens=1, context=limits.max_context)
        prefill = StepShape(batch=limits.max_batch, tokens=limits.max_step_tokens, context=limits.max_context)
        return {
            **request.facts.to_json(),
            "deployment": {
                "dtype": request.deployment.dtype,
                "batch": limits.max_batch,
                "context": limits.max_context,
                "step_tokens": limits.max_step_tokens,
                "engram_residency": {
                    str(s.spec.layer_id): residency_of(s, request.deployment) for s in self.stages if s.table_bytes
                },
            },
            "cache": {
                "packed_bytes_per_token": rates.packed,
                "allocated_bytes_per_token": rates.allocated,
                "packed_window_slot_bytes": rates.packed_window_slot,
                "allocated_window_slot_bytes": rates.allocated_window_slot,
            },
            "stages": [_stage_json(stage) for stage in self.stages],
            "devices": [self._device_json(device) for device in self.devices],
            "host": {
                "export": self.export(),
                "build": build_needs(self.num_engines),
                "run": self.host(),
            },
            "engines": {"plans": self.num_engines, "stages": len(self.stages)},
            "traffic": {
                name: traffic(self.devices, config, step.rows, step.batch)
                for name, step in (("decode", decode), ("prefill", prefill))
            },
            "ceilings": request.rates.to_json(),
            "floors": {"decode": self._floor(decode), "prefill": self._prefill_floor(prefill)},
            "placements": self._placements(),
        }

    @property
    def num_engines(self) -> int:
        """Plans of a build: stages of one kind share one."""
        return len({stage.spec.kind for stage in self.stages})

    def _device_json(self, device: DevicePlan) -> dict[str, Any]:
        return {
            "device": device.name,
            "stages": [stage.spec.name for stage in device.stages],
            "memory_bytes": self.request.gpu_memory if self.request.gpu else self.request.host_memory,
            "phases": {name: dict(parts) for name, parts in device.phases.items()},
        }

    def _floor(self, step: StepShape) -> dict[str, Any]:
        """A step's least time: the sum over the devices, because each waits for the one before it."""
        work = [self.work(device.stages, step) for device in self.devices]
        links = traffic(self.devices, self.request.facts.config, step.rows, step.batch)
        crossing = sum(int(str(link["bytes"])) for link in links)
        per_device = [part.floor_us(self.request.rates) for part in work]
        everything = total(work)
        transfer = crossing * MICROSECONDS // self.request.rates.link
        return {
            "read_bytes": everything.read_bytes,
            "operations": everything.operations,
            "device_us": per_device,
            "transfer_us": transfer,
            "step_us": sum(per_device) + transfer,
            "engram_rows": step.rows * self.request.facts.config.engram_columns * self._num_tables,
            "engram_fetch_us": self._fetch_us(step),
        }

    @property
    def _num_tables(self) -> int:
        return sum(1 for stage in self.stages if stage.table_bytes)

    def _fetch_us(self, step: StepShape) -> int:
        """Random reads of tables on the disk, if no row is in memory; they overlap the first stages."""
        fetched = sum(
            1 for s in self.stages if s.table_bytes and residency_of(s, self.request.deployment) in ("mmap", "packed")
        )
        rows = step.rows * self.request.facts.config.engram_columns * fetched
        return rows * MICROSECONDS // self.request.rates.disk_reads

    def _prefill_floor(self, step: StepShape) -> dict[str, Any]:
        """One step of the largest size, and a whole context in such steps."""
        floor = self._floor(step)
        steps = -(-self.request.deployment.limits.max_context // max(step.tokens, 1))
        first, slowest = floor["step_us"], max(floor["device_us"])
        return {**floor, "steps": steps, "context_us": first + (steps - 1) * slowest}

    def _placements(self) -> dict[str, Any]:
        """A token at batch 1: stages one after the other on pipelined devices, or experts spread over all."""
        request, config = self.request, self.request.facts.config
        step = StepShape(batch=1, tokens=1, context=request.deployment.limits.max_context)
        single = Plan.of(replace(request, num_gpus=1), self.stages) if request.gpu else self
        pipeline = self._floor(step)
        ranks = max(request.num_gpus, 1)
        experts = sum(stage.expert_bytes for stage in self.stages)
        rows = request.deployment.limits.max_batch * request.deployment.limits.max_step_tokens
        whole = single.devices[0].phases["prefill"]
        read = total(
            replace_experts(self.work([stage], step), stage, config.n_routed_experts, config.n_activated_experts, ranks)
            for stage in self.stages
        )
        blocks = sum(1 for stage in self.stages if stage.expert_bytes)
        # At most: a token goes once to each device, and one output for each expert elsewhere comes back.
        chosen, item = config.n_activated_experts, ITEM_BYTES[request.deployment.dtype]
        rows_moved = min(chosen, ranks - 1) + chosen * (ranks - 1) // ranks
        exchanged = blocks * rows_moved * config.dim * item
        return {
            "pipeline": {
                "devices_used": len(self.devices),
                "token_us": pipeline["step_us"],
                "device_us": pipeline["device_us"],
                "busy_devices_at_batch_1": 1,
            },
            "experts_spread": {
                "devices_used": ranks,
                "bytes_per_device": whole["total"] - experts + -(-experts // ranks),
                "token_us": read.floor_us(request.rates) + exchanged * MICROSECONDS // request.rates.link,
                "exchanged_bytes_per_token": exchanged,
                "exchanged_bytes_per_prefill_step": exchanged * rows,
                "exchanges_per_token": blocks,
                "supported": True,
            },
        }


def _specs(request: PlanRequest) -> tuple[StageSpec, ...]:
    """The chain; of a partial checkpoint its blocks, which is what an export of it makes."""
    deployment, facts = request.deployment, request.facts
    return chain_specs(
        facts.config,
        deployment.dtype,
        packed_experts=True,
        dspark_taps=deployment.dspark_taps,
        split_experts=bool(deployment.experts),
        layers=facts.layers,
    )


def replace_experts(work: StepWork, stage: StageBytes, experts: int, chosen: int, ranks: int) -> StepWork:
    """The work of one token where its chosen experts lie on several devices that read at the same time."""
    one = stage.expert_bytes // experts
    return replace(work, read_bytes=work.read_bytes - one * (chosen - -(-chosen // ranks)))


def _stage_json(stage: StageBytes) -> dict[str, Any]:
    return {
        "name": stage.spec.name,
        "kind": stage.spec.kind,
        "parameters": stage.parameters,
        "stored_bytes": stage.stored_bytes,
        "dense_bytes": stage.dense_bytes,
        "data_file_bytes": stage.data_bytes,
        "expert_bytes": stage.expert_bytes,
        "engram_table_bytes": stage.table_bytes,
    }
