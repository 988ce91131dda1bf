"""`engram-trt plan`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.configs.deployment import DeploymentConfig
    from engram_trt.export.planning.plan import PlanRequest


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint, or a preset: released, tiny")
    parser.add_argument("--gpus", metavar="N", type=int, help="GPUs; 0 for the CPU (default: of the deployment)")
    parser.add_argument("--gpu-memory", metavar="GIB", type=float, help="of each GPU")
    parser.add_argument("--host-memory", metavar="GIB", type=float, help="of the machine")
    parser.add_argument("--disk", metavar="GIB", type=float, help="free, for the artefact")
    parser.add_argument("--context", metavar="L", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", metavar="B", type=int, help="sequences")
    parser.add_argument("--step-tokens", metavar="T", type=int, help="tokens of a sequence in one step")
    parser.add_argument("--deployment", metavar="FILE", type=Path, help="deployment file (TOML)")
    parser.add_argument("--memory-bandwidth", metavar="GB/S", type=float, help="ceiling: a device reads its memory")
    parser.add_argument("--tflops", metavar="T", type=float, help="ceiling: operations a second of a device")
    parser.add_argument("--link-bandwidth", metavar="GB/S", type=float, help="ceiling: between two devices")
    parser.add_argument("--probe", action="store_true", help="measure this machine's ceilings, memory and disk")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON with plain integers")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.export.planning.plan import Plan
    from engram_trt.export.planning.report import report_lines
    from engram_trt.export.planning.verdict import verdict

    plan = Plan.of(plan_request(arguments))
    document = {**plan.to_json(), "verdict": verdict(plan)}
    print(json.dumps(document) if arguments.json else "\n".join(report_lines(document)))
    return 0


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """What the command line asks for; RequestError for a number that is none."""
    from engram_trt.export.planning.ceilings import ASSUMED, CPU, GPU
    from engram_trt.export.planning.facts import model_facts
    from engram_trt.export.planning.plan import PlanRequest

    _require_positive(arguments)
    facts = model_facts(arguments.model)
    deployment = _deployment(arguments, None if facts.root else facts.name)
    default = sum(1 for device in deployment.devices if device.startswith("cuda"))
    num_gpus = default if arguments.gpus is None else arguments.gpus
    ceilings = ASSUMED[GPU if num_gpus else CPU]
    host_memory, disk = _bytes(arguments.host_memory), _bytes(arguments.disk)
    if arguments.probe:
        from engram_trt.export.planning.probe import probe

        found = probe(facts.root or Path.cwd())
        rates = {"disk_reads": found.disk_reads, "memory": found.gpu_memory_rate}
        if not num_gpus:
            rates |= {"memory": found.memory, "operations": found.operations}
        ceilings = ceilings.with_rates("probed", rates)
        host_memory, disk = host_memory or found.host_memory, disk or found.disk
    given = {
        "memory": _scaled(arguments.memory_bandwidth, 10**9),
        "operations": _scaled(arguments.tflops, 10**12),
        "link": _scaled(arguments.link_bandwidth, 10**9),
    }
    return PlanRequest(
        facts=facts,
        deployment=deployment,
        num_gpus=num_gpus,
        gpu_memory=_bytes(arguments.gpu_memory),
        host_memory=host_memory,
        disk=disk,
        ceilings=ceilings.with_rates("given", given),
    )


def _require_positive(arguments: argparse.Namespace) -> None:
    for option, value in vars(arguments).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = 0 if option == "gpus" else 1e-9
            if not least <= value < 1e15:
                raise RequestError(
                    f"--{option.replace('_', '-')}",
                    found=str(value),
                    expected="0 or more" if option == "gpus" else "more than 0",
                    remedy="Give another number.",
                )


def _deployment(arguments: argparse.Namespace, preset: str | None) -> DeploymentConfig:
    """The file's, else the preset's, else the defaults; with the limits of the command line."""
    from engram_trt.configs.deployment import DeploymentConfig
    from engram_trt.configs.preset_files import deployment_preset

    if arguments.deployment is not None:
        deployment = DeploymentConfig.from_file(arguments.deployment)
    else:
        deployment = deployment_preset(preset) if preset else DeploymentConfig()
    limits = deployment.limits
    context = arguments.context or limits.max_context
    limits = replace(
        limits,
        max_context=context,
        max_batch=arguments.batch or limits.max_batch,
        max_step_tokens=arguments.step_tokens or min(limits.max_step_tokens, context),
    )
    return replace(deployment, limits=limits)


def _bytes(gib: float | None) -> int | None:
    return _scaled(gib, 1 << 30)


def _scaled(value: float | None, factor: int) -> int | None:
    return None if value is None else int(value * factor)


COMMAND = Command(
    summary="say what a model needs and what a step costs, before a byte is written",
    description=(
        "Bytes by device and phase, memory and disk of export and build, engines, traffic, floors of a decode step\n"
        "and a prefill, and whether it fits. Reads a checkpoint's config, index and shard headers only; `released`\n"
        "needs no files at all. Ceilings are assumed (one H200, or two CPU cores), given, or measured by --probe."
    ),
    examples="""
    engram-trt plan released --gpus 8 --gpu-memory 141
    engram-trt plan checkpoint --gpus 0 --host-memory 24 --disk 60 --probe
    engram-trt plan released --gpus 5 --gpu-memory 180 --context 262144 --batch 1 --json
    """,
    configure=_configure,
    run=_run,
)
