"""The progress bar of `engram-trt export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from engram_trt.export.pipeline import Progress as ExportProgress


@contextmanager
def export_progress() -> Iterator[ExportProgress]:
    """Callbacks that move a bar on standard error: weight bytes, and how many stages are complete."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tracing", total=None)
        state = {"stages": 0, "done": 0}

        def plan(num_bytes: int, num_stages: int) -> None:
            state["stages"] = num_stages
            bar.update(task, total=num_bytes)

        def traced(kind: str) -> None:
            bar.update(task, description=f"traced {kind}")

        def written(num_bytes: int) -> None:
            bar.update(task, advance=num_bytes)

        def stage(name: str, reused: bool) -> None:
            state["done"] += 1
            what = "unchanged" if reused else "written"
            bar.update(task, description=f"{name} {what} ({state['done']}/{state['stages']})")

        yield ExportProgress(plan=plan, traced=traced, written=written, stage=stage)
