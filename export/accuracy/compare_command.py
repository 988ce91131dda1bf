"""`engram-trt compare`: an artefact's back ends against each other, or everything against golden vectors."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import BackendError, RequestError
from engram_trt.runtime.cli import Command
from engram_trt.runtime.verification import add_verify_option

_GOLDEN_BACKENDS = ("torch", "onnxruntime")
_LEVELS = ("op", "stage", "chain", "tokens")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, nargs="?", help="folder of an export")
    parser.add_argument("--golden", metavar="DIR", type=Path, help="compare with a folder of golden vectors instead")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="where the artefact's checkpoint is now")
    add_verify_option(parser)
    parser.add_argument("--level", choices=_LEVELS, default="chain", help="how closely to look (%(default)s)")
    parser.add_argument("--backends", metavar="NAMES", help="what to compare, separated by commas (onnxruntime)")
    parser.add_argument(
        "--reference",
        metavar="NAME",
        default="torch",
        help="back end, or saved outputs (.json), to compare with",
    )
    parser.add_argument("--stages", metavar="NAMES", default="", help="stages to report, separated by commas (all)")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="UTF-8 text, a blank line behind each prompt")
    parser.add_argument("--num-prompts", metavar="N", type=int, default=64, help="of the default set (%(default)s)")
    parser.add_argument("--num-decode", metavar="N", type=int, default=32, help="tokens fed singly (%(default)s)")
    parser.add_argument(
        "--mode",
        choices=("teacher-forced", "free"),
        default="teacher-forced",
        help="both sides get the text's tokens, or each its own choice (%(default)s)",
    )
    parser.add_argument("--bisect", action="store_true", help="go down from the first divergent stage to the op")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first difference")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="write limits from the model's own noise, beside the manifest",
    )
    parser.add_argument("--tolerances", metavar="FILE", type=Path, help="limits of a calibration (the artefact's own)")
    parser.add_argument(
        "--stale-index-keys",
        action="store_true",
        help="let the eager reference reproduce the published code's stale index keys in decode",
    )
    parser.add_argument("--save-outputs", metavar="FILE", type=Path, help="only run the back end and save its outputs")
    parser.add_argument("--load-outputs", metavar="FILE", type=Path, help="compare saved outputs instead of a back end")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the outcome as one page with charts")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the outcome as JSON")


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.artifact is None) == (arguments.golden is None):
        raise RequestError(
            "compare",
            found="an artefact and --golden" if arguments.artifact else "neither an artefact nor --golden",
            expected="one of them",
            remedy="See `engram-trt compare --help`.",
        )
    for option in ("html", "json", "save_outputs", "tolerances"):
        _require_folder_of(option.replace("_", "-"), getattr(arguments, option))
    return _golden(arguments) if arguments.artifact is None else _artifact(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    from engram_trt.export.accuracy.divergence.calibration import calibrate
    from engram_trt.export.accuracy.divergence.tolerances import FILE_NAME, write_tolerances
    from engram_trt.runtime.artifact import Artifact

    artifact = Artifact.open(arguments.artifact, arguments.checkpoint, arguments.verify)
    path = arguments.tolerances or artifact.root / FILE_NAME
    with _progress() as progress:
        measured, how = calibrate(artifact, progress)
    write_tolerances(artifact, path, measured, how)
    largest = max(measured, key=lambda key: measured[key].noise)
    item = measured[largest]
    print(f"{path}: limits of {len(measured)} tensors")
    print(f"largest noise {item.noise:.1e}: {largest}, {item.by}; limit {item.limit:.1e}")
    return 0


def _artifact(arguments: argparse.Namespace) -> int:
    _require_packages("torch", "onnx", "polygraphy")
    if arguments.calibrate:
        return _calibrate(arguments)
    from rich.console import Console

    from engram_trt.export.accuracy.divergence.comparison import CompareRequest, Comparison
    from engram_trt.export.accuracy.divergence.table import WIDTH, print_report
    from engram_trt.runtime.artifact import Artifact

    request = CompareRequest(
        artifact=Artifact.open(arguments.artifact, arguments.checkpoint, arguments.verify),
        backends=_names("--backends", arguments.backends or "onnxruntime"),
        reference=arguments.reference,
        level=arguments.level,
        stages=_names("--stages", arguments.stages) if arguments.stages else (),
        prompts=arguments.prompts,
        num_prompts=_positive("--num-prompts", arguments.num_prompts),
        num_decode=_positive("--num-decode", arguments.num_decode),
        free=arguments.mode == "free",
        bisect=arguments.bisect,
        keep_going=arguments.keep_going,
        tolerances=arguments.tolerances,
        gates=arguments.html is not None or arguments.json is not None,
        stale_keys=arguments.stale_index_keys,
        saved=arguments.load_outputs,
    )
    with _progress() as progress:
        comparison = Comparison(request, progress)
        if arguments.save_outputs is not None:
            _require_one_backend(request.backends)
            comparison.save(arguments.save_outputs)
            print(f"{arguments.save_outputs}: outputs of {request.backends[0]}")
            return 0
        report = comparison.run()
    print_report(report, Console(width=WIDTH, highlight=False))
    _write_json(arguments.json, report.as_json())
    if arguments.html is not None:
        from engram_trt.export.accuracy.divergence.page import page

        arguments.html.write_text(page(report), encoding="utf-8")
    return report.exit_code


def _golden(arguments: argparse.Namespace) -> int:
    backends = _golden_backends(arguments.backends or ",".join(_GOLDEN_BACKENDS))
    from rich.console import Console

    from engram_trt.export.accuracy.golden_compare import compare_folder
    from engram_trt.export.accuracy.golden_report import WIDTH

    with _progress() as progress:
        report = compare_folder(arguments.golden, backends, progress)
    report.print_to(Console(width=WIDTH, highlight=False))
    _write_json(arguments.json, report.as_json())
    return report.exit_code


def _write_json(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        from engram_trt.export.accuracy.golden_folder import dump_json

        dump_json(document, path)


def _golden_backends(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once; RequestError for one that is none, BackendError if not installed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _GOLDEN_BACKENDS]
    if unknown or not names:
        raise RequestError(
            "--backends",
            found=repr(text),
            expected=f"some of {', '.join(_GOLDEN_BACKENDS)}, separated by commas",
            remedy="Name a back end of the list.",
        )
    _require_packages("torch", *names)
    return names


def _names(option: str, text: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise RequestError(
            option, found=repr(text), expected="names separated by commas", remedy="Leave it out for the default."
        )
    return names


def _require_one_backend(names: tuple[str, ...]) -> None:
    if len(names) != 1:
        raise RequestError(
            "--save-outputs",
            found=f"{len(names)} back ends",
            expected="one back end per file",
            remedy="Name one with --backends.",
        )


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise RequestError(option, found=str(value), expected="at least 1", remedy="Leave it out for the default.")
    return value


def _require_packages(*names: str) -> None:
    missing = [name for name in dict.fromkeys(names) if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"package {missing[0]}",
            found="not installed",
            expected="what the comparison computes with",
            remedy="Install the extras `export`, `onnxruntime` and `compare` of this package.",
        )


def _require_folder_of(option: str, path: Path | None) -> None:
    """RequestError before minutes of work, if the report could not be written afterwards."""
    if path is not None and not path.parent.is_dir():
        raise RequestError(
            f"--{option}",
            found=f"{path}, in a folder that does not exist",
            expected="a file in an existing folder",
            remedy="Create the folder first.",
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total or None)


COMMAND = Command(
    summary="find where two back ends first compute something else",
    description=(
        "Run an artefact's stages side by side with the eager modules, on real text, and compare every output and\n"
        "every cache after each stage: the first one out of its limit is named, with the worst places, and whether\n"
        "the stage itself or its inputs are the cause. With --golden, walk a folder of golden vectors instead.\n"
        "Exit code 0: they agree; 1: something differs; 2: a wrong call."
    ),
    examples="""
    engram-trt compare artefact
    engram-trt compare artefact --bisect --json outcome.json --html outcome.html
    engram-trt compare artefact --calibrate
    engram-trt compare artefact --level tokens --mode free --prompts prompts.txt
    engram-trt compare --golden golden --backends torch
    """,
    configure=_configure,
    run=_run,
)
