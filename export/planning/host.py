"""Memory and disk of the machine itself: for the export, for a build, and beside the devices while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS
from engram_trt.export.planning.devices import DevicePlan, residency_of, staging_bytes
from engram_trt.export.planning.stage_bytes import StageBytes
from engram_trt.export.write_limits import PAGES_KEPT_BYTES, WriteLimits

GIB = 1 << 30

TOOLCHAIN_BYTES = 415 << 20
"""Resident memory of an export with torch, onnx and a few graphs, and no weight read yet."""
NAME_BYTES = 1200
"""What it adds for every tensor of the checkpoint: names, shapes, places."""
RUNTIME_BYTES = 50 << 20
"""The same with numpy, a tokenizer and ONNX Runtime, before anything is loaded."""
CUDA_HOST_BYTES = 400 << 20
"""What a CUDA context and a TensorRT runtime add to it."""
STAGE_BYTES = 18 << 18
"""Graph, kernels and arena of one ONNX Runtime session."""
GRAPH_BYTES = 350_000
"""Size of a stage's .onnx file, about; a dry run of the export says it exactly."""
PLAN_BYTES = 5_000_000
"""Size of a TensorRT plan with bound weights, about."""
BUILDER_BYTES = 2 * GIB
"""Memory that one builder is given."""


def export_needs(stages: Sequence[StageBytes], *, num_tensors: int, copied_bytes: int) -> dict[str, int]:
    """Host memory and disk of an export.

    `memory_bytes` is that of one process that has its graphs and writes alone: an estimate, within a tenth of what is
    measured. It reads about half of what it writes, and keeps these pages for `PAGES_KEPT_BYTES` of writing. All
    processes together, also those that trace, are bounded by `max_memory_bytes`, pages of shards apart.

    Args:
        stages: to be exported.
        num_tensors: of the checkpoint.
        copied_bytes: to be read from the checkpoint on the way (dense weights as they are stored).
    """
    data = sum(stage.data_bytes for stage in stages)
    experts = sum(stage.expert_bytes for stage in stages)
    graphs = len(stages) * GRAPH_BYTES
    largest = max((stage.data_bytes for stage in stages), default=0)
    return {
        "memory_bytes": TOOLCHAIN_BYTES + num_tensors * NAME_BYTES + min(PAGES_KEPT_BYTES, largest) // 2,
        "max_memory_bytes": WriteLimits().memory_bytes,
        "data_file_bytes": data,
        "graph_bytes_about": graphs,
        "disk_bytes": data + graphs,
        "disk_bytes_with_copied_experts": data + graphs + experts,
        "read_bytes": copied_bytes,
    }


def build_needs(num_plans: int) -> dict[str, int]:
    """Host memory and disk of a TensorRT build, one builder at a time."""
    return {"memory_bytes": BUILDER_BYTES, "plans": num_plans, "disk_bytes_about": num_plans * PLAN_BYTES}


def run_needs(
    devices: Sequence[DevicePlan], config: ModelConfig, deployment: DeploymentConfig, *, gpu: bool
) -> dict[str, int]:
    """Host memory while the model runs: on a CPU the devices are the host."""
    stages = [stage for device in devices for stage in device.stages]
    tables = [stage for stage in stages if stage.table_bytes]
    fetched = [stage for stage in tables if residency_of(stage, deployment) != "device"]
    parts = {
        "process": RUNTIME_BYTES + (CUDA_HOST_BYTES if gpu else len(stages) * STAGE_BYTES),
        "engram_tables": sum(s.table_bytes for s in fetched if residency_of(s, deployment) == "host"),
        "engram_cache": sum(
            deployment.engram.cache_mib << 20
            for stage in fetched
            if residency_of(stage, deployment) in ("mmap", "packed")
        ),
        "engram_staging": len(fetched) * staging_bytes(config, deployment),
        # The copy that stacks experts is made one tensor ahead of the one being handed over.
        "expert_upload": 2 * max((largest_expert_tensor(stage, config) for stage in stages), default=0) if gpu else 0,
    }
    if not gpu:
        parts["stages"] = devices[0].peak_bytes
    return {**parts, "total": sum(parts.values())}


def largest_expert_tensor(stage: StageBytes, config: ModelConfig) -> int:
    """Bytes of the largest stacked tensor of a stage's experts."""
    known = {"table_rows": 0, EXPERTS: config.n_routed_experts}
    return max((t.num_bytes(known) for t in stage.spec.inputs if t.role == "resident"), default=0)
