"""`engram-trt build`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engram_trt.runtime.cli import Command

_GIB = 1 << 30


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", type=Path, help="an exported artefact")
    parser.add_argument(
        "--backend", metavar="NAME", default="tensorrt", help="tensorrt (default), or tensorrt_rtx: needs no GPU"
    )
    parser.add_argument(
        "--target",
        metavar="SMS",
        action="append",
        default=[],
        help="GPUs to build for, as in sm_89,sm_120 (default: the one in this machine)",
    )
    parser.add_argument("--stages", metavar="NAMES", help="only these, as in engram_hash,block_02")
    parser.add_argument("--bake-weights", action="store_true", help="keep dense weights as constants of the plans")
    parser.add_argument("--jobs", metavar="N", type=int, help="builders at a time (default: as many as fit)")
    parser.add_argument(
        "--max-build-memory", metavar="GIB", type=float, help="for all builders together (default: most of the free)"
    )
    parser.add_argument(
        "--max-build-minutes", metavar="N", type=float, default=15.0, help="for one builder (default 15)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.errors import BackendError
    from engram_trt.export.engines.build import BuildProgress, BuildRequest, build_engines
    from engram_trt.export.engines.targets import name_of, parse_targets
    from engram_trt.plugins.tensorrt_api import BACKENDS
    from engram_trt.runtime.cuda_driver import local_compute_capability

    if arguments.backend not in BACKENDS:
        raise BackendError(
            "--backend",
            found=repr(arguments.backend),
            expected=" or ".join(BACKENDS),
            remedy="Other back ends need no build.",
        )
    targets = parse_targets(arguments.backend, arguments.target, local_compute_capability())
    memory = arguments.max_build_memory
    request = BuildRequest(
        artifact=arguments.artifact,
        backend=arguments.backend,
        targets=targets,
        stages=tuple(arguments.stages.split(",")) if arguments.stages is not None else None,
        bake_weights=arguments.bake_weights,
        jobs=arguments.jobs,
        max_memory_bytes=None if memory is None else int(memory * _GIB),
        max_seconds=60 * arguments.max_build_minutes,
    )
    total = [0, 0]

    def announce(plans: int, reused: int, kernels: int) -> None:
        _say(f"{plans} plans to build, {reused} unchanged; {kernels} kernels to compile")

    def done(name: str, seconds: float, peak_bytes: int) -> None:
        total[0] += 1
        _say(f"[{total[0]}] {name}: {seconds:.1f} s, {peak_bytes / 2**20:,.0f} MiB")

    folder, manifest, unchanged = build_engines(request, BuildProgress(plan=announce, done=done))
    facts: dict[str, Any] = {
        "engines": str(folder),
        "digest": manifest.to_json()["digest"],
        "unchanged": unchanged,
        "backend": f"{manifest.backend} {manifest.backend_version}",
        "targets": [name_of(sm) for sm in manifest.targets],
        "stages": len(manifest.stages),
        "plans": len(manifest.plans),
        "kernels": len(manifest.kernels),
        "bytes": sum(plan.file.num_bytes for plan in manifest.plans),
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        state = "unchanged" if unchanged else "built"
        print(
            f"{folder}: {state}; {facts['stages']} stages on {facts['plans']} plans, {facts['bytes'] / 2**20:,.1f} MiB,"
            f" {facts['kernels']} kernels, for {', '.join(facts['targets'])}"
        )
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMAND = Command(
    summary="build TensorRT plans from an artefact",
    description=(
        "Build the stages of an artefact into TensorRT plans whose custom operations are this package's kernels,\n"
        "under DIR/engines/. Stages with the same graph share a plan; an unchanged one is not built again.\n"
        "TensorRT builds for the GPU it runs on; TensorRT-RTX builds for sm_89 and sm_120 on any machine."
    ),
    examples="""
    engram-trt build artefact
    engram-trt build artefact --backend tensorrt_rtx --target sm_89,sm_120
    engram-trt build artefact --backend tensorrt_rtx --stages block_02 --jobs 1 --max-build-memory 3
    """,
    configure=_configure,
    run=_run,
)
