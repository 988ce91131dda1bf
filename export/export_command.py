"""`engram-trt export`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.configs.artifact import Manifest
    from engram_trt.export.pipeline import Progress


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint in the released layout")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the artefact will be")
    parser.add_argument("--deployment", metavar="FILE", type=Path, help="deployment file (TOML): limits, numerics")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="overrides the deployment file")
    parser.add_argument("--stages", metavar="NAMES", help="only these, as in engram_hash,block_02")
    parser.add_argument("--no-weights", action="store_true", help="data files of zeros; no weight is read")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.deployment import DeploymentConfig
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint

    deployment = DeploymentConfig.from_file(arguments.deployment) if arguments.deployment else DeploymentConfig()
    if arguments.dtype is not None:
        deployment = replace(deployment, dtype=arguments.dtype)
    request = ExportRequest(
        checkpoint=arguments.checkpoint,
        out=arguments.out,
        deployment=deployment,
        stages=tuple(arguments.stages.split(",")) if arguments.stages else None,
        weights=not arguments.no_weights,
    )
    with export_bar() as progress:
        manifest = export_checkpoint(request, progress)
    facts = _facts(arguments.out, manifest)
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"{arguments.out}: {facts['stages']} stages, {facts['bytes'] / 2**20:,.1f} MiB, {deployment.dtype}")
    return 0


def _facts(out: Path, manifest: Manifest) -> dict[str, Any]:
    files = [record for stage in manifest.stages for record in (stage.onnx, stage.data)]
    return {
        "artifact": str(out),
        "digest": manifest.digest,
        "stages": len(manifest.stages),
        "bytes": sum(record.num_bytes for record in (*files, *manifest.files)),
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
        "Experts and Engram tables stay in the checkpoint. A killed export leaves the old artefact or none;\n"
        "the same command resumes it."
    ),
    examples="""
    engram-trt export checkpoint --out artefact
    engram-trt export checkpoint --out artefact --deployment deployment.toml --dtype bfloat16
    engram-trt export released-2-20 --out trial --stages block_02 --no-weights
    """,
    configure=_configure,
    run=_run,
)
