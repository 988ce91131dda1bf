"""`engram-trt export`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.configs.artifact import Manifest
    from engram_trt.export.pipeline import ExportRequest, Progress

GIB = 1 << 30


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint in the released layout")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the artefact will be")
    parser.add_argument("--deployment", metavar="FILE", type=Path, help="deployment file (TOML): limits, numerics")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="overrides the deployment file")
    parser.add_argument("--stages", metavar="NAMES", help="only these, as in engram_hash,block_02")
    parser.add_argument("--layers", metavar="IDS", help="only the blocks of these layers, as in 2,8,20, for a trial")
    parser.add_argument("--copy-experts", action="store_true", help="copy the experts too, stacked to be mapped")
    parser.add_argument("--no-weights", action="store_true", help="data files of zeros; no weight is read")
    parser.add_argument("--dry-run", action="store_true", help="list every file with its size; write none")
    parser.add_argument("--jobs", metavar="N", type=int, help="processes that write stages (default: one per core)")
    parser.add_argument(
        "--max-memory", metavar="GIB", type=float, default=2.0, help="held by all of them together (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    if arguments.dry_run:
        _print_files(request, as_json=arguments.json)
        return 0
    from engram_trt.export.memory_cap import capped_memory
    from engram_trt.export.pipeline import export_checkpoint

    with export_bar() as progress, capped_memory(request.limits.memory_bytes, os.cpu_count() or 1):
        clock = _Clock.start()
        manifest = export_checkpoint(request, clock.around(progress))
    facts = _facts(arguments.out, manifest, clock)
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(
            f"{arguments.out}: {facts['stages']} stages, {facts['bytes'] / 2**20:,.1f} MiB, "
            f"{request.deployment.dtype}; {facts['moved_bytes'] / 2**20:,.1f} MiB in {facts['seconds']:.1f} s, "
            f"{facts['bytes_per_s'] / 2**20:,.0f} MiB/s, tracing apart"
        )
    return 0


def _request(arguments: argparse.Namespace) -> ExportRequest:
    from engram_trt.configs.deployment import DeploymentConfig
    from engram_trt.export.pipeline import ExportRequest
    from engram_trt.export.synth_command import layer_list
    from engram_trt.export.write_limits import WriteLimits

    if (arguments.jobs is not None and arguments.jobs < 1) or not 0 < arguments.max_memory < 1 << 20:
        raise RequestError(
            "--jobs, --max-memory", found="a number that is none", expected="1 or more", remedy="Give another."
        )
    deployment = DeploymentConfig.from_file(arguments.deployment) if arguments.deployment else DeploymentConfig()
    if arguments.dtype is not None:
        deployment = replace(deployment, dtype=arguments.dtype)
    return ExportRequest(
        checkpoint=arguments.checkpoint,
        out=arguments.out,
        deployment=deployment,
        stages=tuple(arguments.stages.split(",")) if arguments.stages else None,
        layers=layer_list(arguments.layers),
        weights=not arguments.no_weights,
        copy_experts=arguments.copy_experts,
        limits=WriteLimits(jobs=arguments.jobs, memory_bytes=int(arguments.max_memory * GIB)),
    )


def _print_files(request: ExportRequest, *, as_json: bool) -> None:
    from engram_trt.export.dry_run import planned_files

    files = planned_files(request)
    total = sum(file.num_bytes for file in files)
    if as_json:
        print(json.dumps({"files": [[file.path, file.num_bytes] for file in files], "bytes": total}))
        return
    for file in files:
        print(f"{file.num_bytes:>18,}  {file.path}")
    print(f"{total:>18,}  in {len(files)} files; nothing was written")


@dataclass(slots=True)
class _Clock:
    """When the last graph was there, and how many bytes moved since."""

    started: float
    moved_bytes: int = 0

    @classmethod
    def start(cls) -> _Clock:
        return cls(perf_counter())

    def around(self, progress: Progress | None) -> Progress:
        """The same callbacks, listened to."""
        from engram_trt.export.pipeline import Progress

        inner = progress or Progress()

        def traced(kind: str) -> None:
            self.started = perf_counter()
            inner.traced(kind)

        def written(num_bytes: int) -> None:
            self.moved_bytes += num_bytes
            inner.written(num_bytes)

        return replace(inner, traced=traced, written=written)

    def seconds(self) -> float:
        return max(perf_counter() - self.started, 1e-9)


def _facts(out: Path, manifest: Manifest, clock: _Clock) -> dict[str, Any]:
    seconds = clock.seconds()
    return {
        "artifact": str(out),
        "digest": manifest.digest,
        "stages": len(manifest.stages),
        "bytes": sum(record.num_bytes for record in manifest.all_files()),
        "moved_bytes": clock.moved_bytes,
        "seconds": round(seconds, 3),
        "bytes_per_s": int(clock.moved_bytes / seconds),
    }


def export_bar() -> AbstractContextManager[Progress | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    from engram_trt.export.progress_bar import export_progress

    return export_progress()


COMMAND = Command(
    summary="export a checkpoint to ONNX stages",
    description=(
        "Write one .onnx and one data file per stage (engram_hash, embedding, block_NN, head) and a manifest.\n"
        "Experts and Engram tables stay in the checkpoint, unless --copy-experts gives the artefact its own experts,\n"
        "stacked so that they map as they are. A killed export leaves the old artefact or none; the same command\n"
        "resumes it, and what has not changed is not written again."
    ),
    examples="""
    engram-trt export checkpoint --out artefact
    engram-trt export checkpoint --out artefact --deployment deployment.toml --dtype bfloat16
    engram-trt export released --out trial --layers 2,8,20 --copy-experts --dry-run
    engram-trt export released-2-20 --out trial --stages block_02 --no-weights
    """,
    configure=_configure,
    run=_run,
)
