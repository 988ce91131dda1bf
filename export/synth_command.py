"""`engram-trt synth`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.export.synth import SynthReport, SynthRequest


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", default="tiny", help="tiny (default) or released")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a model config instead of the preset's")
    parser.add_argument("--layers", metavar="IDS", help="a partial checkpoint with these layers, as in 2,8,20")
    parser.add_argument(
        "--tokenizer", metavar="FILE", type=Path, help="a tokenizer.json to copy; by default a small one is trained"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to make")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--dense-tables", action="store_true", help="fill Engram tables above 4 GiB as well")
    parser.add_argument("--sparse", action="store_true", help="names, shapes and headers; all weights are holes")
    parser.add_argument("--force", action="store_true", help="replace an earlier checkpoint at DIR")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def layer_list(text: str | None) -> tuple[int, ...] | None:
    """`2,8,20` -> (2, 8, 20); None for None; `RequestError` for anything else."""
    if text is None:
        return None
    try:
        return tuple(sorted({int(entry) for entry in text.split(",")}))
    except ValueError:
        raise RequestError(
            "--layers", found=repr(text), expected="layer ids with commas", remedy="Write it as in 2,8,20."
        ) from None


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.model import ModelConfig
    from engram_trt.configs.preset_files import model_preset
    from engram_trt.export.synth import SynthRequest

    if arguments.seed < 0:
        raise RequestError("--seed", found=str(arguments.seed), expected="0 or more", remedy="Give another seed.")
    is_preset = arguments.config is None
    request = SynthRequest(
        config=model_preset(arguments.preset) if is_preset else ModelConfig.from_file(arguments.config),
        out=arguments.out,
        seed=arguments.seed,
        layers=layer_list(arguments.layers),
        tokenizer=arguments.tokenizer,
        dense_tables=arguments.dense_tables,
        sparse=arguments.sparse,
        force=arguments.force,
    )
    report = _with_progress(request)
    if arguments.json:
        print(json.dumps(_facts(report)))
    else:
        print(
            f"{report.out}: {report.num_tensors:,} tensors in {report.num_shards} shards, "
            f"{report.num_bytes / 2**20:,.1f} MiB"
        )
    return 0


def _with_progress(request: SynthRequest) -> SynthReport:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from engram_trt.export.synth import bytes_to_write, synthesize

    if not sys.stderr.isatty():
        return synthesize(request)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=bytes_to_write(request))
        return synthesize(request, lambda shard, done: bar.update(task, description=shard, advance=done))


def _facts(report: SynthReport) -> dict[str, object]:
    return {
        "checkpoint": str(report.out),
        "tensors": report.num_tensors,
        "shards": report.num_shards,
        "bytes": report.num_bytes,
        "engram_compressed_vocab_size": report.config.engram_compressed_vocab_size,
        "config_digest": report.config.digest(),
    }


COMMAND = Command(
    summary="write a synthetic checkpoint in the released layout",
    description=(
        "Write shards, index, config and tokenizer of a model with random weights, with the released names,\n"
        "dtypes and split over files. The same arguments give the same bytes. Engram tables above 4 GiB are\n"
        "left as holes that read as zero rows, unless --dense-tables is given. With --sparse all weights are holes:\n"
        "a stand-in for the released checkpoint takes megabytes of disk."
    ),
    examples="""
    engram-trt synth --preset tiny --out checkpoint
    engram-trt synth --preset released --layers 2,20 --tokenizer tokenizer.json --out released-2-20
    """,
    configure=_configure,
    run=_run,
)
