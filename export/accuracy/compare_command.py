"""`engram-trt compare`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.errors import BackendError, RequestError
from engram_trt.runtime.cli import Command

_BACKENDS = ("torch", "onnxruntime")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--golden", metavar="DIR", type=Path, required=True, help="a folder of golden vectors")
    parser.add_argument(
        "--backends", metavar="NAMES", default=",".join(_BACKENDS), help=f"some of {','.join(_BACKENDS)} (all of them)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the outcome with plain numbers")


def _run(arguments: argparse.Namespace) -> int:
    backends = _backends(arguments.backends)
    _require_folder_of(arguments.json)
    from rich.console import Console

    from engram_trt.export.accuracy.golden_compare import compare_folder
    from engram_trt.export.accuracy.golden_folder import dump_json
    from engram_trt.export.accuracy.golden_report import WIDTH

    with _progress() as progress:
        report = compare_folder(arguments.golden, backends, progress)
    report.print_to(Console(width=WIDTH, highlight=False))
    if arguments.json is not None:
        dump_json(report.as_json(), arguments.json)
    return report.exit_code


def _backends(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once; RequestError for one that is none, BackendError if not installed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _BACKENDS]
    if unknown or not names:
        raise RequestError(
            "--backends",
            found=repr(text),
            expected=f"some of {', '.join(_BACKENDS)}, separated by commas",
            remedy="Name a back end of the list.",
        )
    missing = [name for name in dict.fromkeys(("torch", *names)) if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"package {missing[0]}",
            found="not installed",
            expected="what the comparison computes with",
            remedy="Install the extras `export` and `onnxruntime` of this package.",
        )
    return names


def _require_folder_of(path: Path | None) -> None:
    """RequestError before minutes of work, if the report could not be written afterwards."""
    if path is not None and not path.parent.is_dir():
        raise RequestError(
            "--json",
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
    summary="compare with golden vectors",
    description=(
        "Walk a folder of golden vectors (hash/, ops/, model/<name>/), compute what it holds through the torch\n"
        "modules and through ONNX Runtime, and print a table of errors against tolerances, and of what was not\n"
        "compared and why. Every size and schedule is taken from the folder.\n"
        "Exit code 1: something differs, or a tensor file was neither compared nor listed."
    ),
    examples="""
    engram-trt compare --golden golden
    engram-trt compare --golden golden --backends torch --json outcome.json
    """,
    configure=_configure,
    run=_run,
)
