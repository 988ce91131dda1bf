"""The progress bar of long work on a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(label: str, num_bytes: int, smallest: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, to be told of bytes done; nothing is shown where that is no terminal.

    Args:
        label: before the bar.
        num_bytes: of the whole work.
        smallest: less is done too soon to be shown.
    """
    if num_bytes < smallest or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda done: bar.update(task, advance=done)
