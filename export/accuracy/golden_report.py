"""A comparison's outcome as a terminal table, as JSON, and as an exit code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram_trt.export.accuracy.golden_results import Check, NotRun, Results

WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All checks of one file, back end and group: a line of the table.

    Args:
        worst: the check with the largest error; one out of its limit before any other.
        num_tensors: how many were compared.
        num_wrong: how many are out of their limit.
    """

    worst: Check
    num_tensors: int
    num_wrong: int

    @property
    def verdict(self) -> str:
        return "differs" if self.num_wrong else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a run found.

    Args:
        folder: the golden folder.
        backends: what was compared.
        results: of all jobs.
        tensor_files: every tensor file of the folder.
    """

    folder: str
    backends: tuple[str, ...]
    results: Results
    tensor_files: tuple[str, ...]

    @property
    def unaccounted(self) -> list[str]:
        """Tensor files that were neither compared, nor computed from, nor listed: a fault of this program."""
        known = {check.file for check in self.results.checks} | {item.file for item in self.results.not_run}
        known |= self.results.inputs
        return [file for file in self.tensor_files if file not in known]

    @property
    def exit_code(self) -> int:
        """1 if anything differs or a tensor file is unaccounted for, else 0."""
        return 1 if self.unaccounted or any(not check.found.ok for check in self.results.checks) else 0

    def rows(self) -> list[Row]:
        """Lines of the table, by file, back end and group."""
        groups: dict[tuple[str, str, str, str], list[Check]] = {}
        for check in self.results.checks:
            groups.setdefault((check.file, check.backend, check.what, str(check.limit)), []).append(check)
        rows = []
        for key in sorted(groups):
            checks = groups[key]
            worst = max(checks, key=lambda check: (not check.found.ok, check.found.error))
            rows.append(
                Row(worst=worst, num_tensors=len(checks), num_wrong=sum(not check.found.ok for check in checks))
            )
        return rows

    def not_run(self) -> list[NotRun]:
        """What was not compared, each once, in order."""
        return sorted(set(self.results.not_run), key=lambda item: (item.file, item.backend, item.what, item.reason))

    def as_json(self) -> dict[str, Any]:
        """The table and the lists with plain numbers; an infinite error is null."""
        return {
            "golden": self.folder,
            "backends": list(self.backends),
            "compared": [_row_json(row) for row in self.rows()],
            "differences": [_check_json(check) for check in self.results.checks if not check.found.ok],
            "not_run": [
                {"file": item.file, "backend": item.backend, "what": item.what, "reason": item.reason}
                for item in self.not_run()
            ],
            "unaccounted": self.unaccounted,
            "num_tensors": len(self.results.checks),
            "exit_code": self.exit_code,
        }

    def print_to(self, console: Console) -> None:
        """The table, what was not run, and one closing line."""
        console.print(_table(self.rows()))
        _print_differences(console, [check for check in self.results.checks if not check.found.ok])
        _print_not_run(console, self.not_run())
        for file in self.unaccounted:
            console.print(f"neither compared nor listed: {file}", style="bold red", markup=False)
        wrong = sum(not check.found.ok for check in self.results.checks)
        verdict = "agree" if self.exit_code == 0 else f"{wrong} DIFFER"
        console.print(f"{len(self.results.checks)} tensors compared: {verdict}", style="bold", markup=False)


def _row_json(row: Row) -> dict[str, Any]:
    return {
        **_check_json(row.worst),
        "num_tensors": row.num_tensors,
        "num_wrong": row.num_wrong,
        "verdict": row.verdict,
    }


def _check_json(check: Check) -> dict[str, Any]:
    limit = check.limit
    return {
        "file": check.file,
        "backend": check.backend,
        "what": check.what,
        "tensor": check.tensor,
        "error": check.found.error if math.isfinite(check.found.error) else None,
        "tolerance": {"kind": limit.kind, "rtol": limit.rtol, "atol": limit.atol, "rms": limit.rms},
        "note": check.found.note,
    }


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, width=WIDTH, title="golden vectors", title_justify="left")
    table.add_column("file", ratio=5, overflow="fold")
    table.add_column("back end", width=11)
    table.add_column("what", ratio=4, overflow="fold")
    table.add_column("worst", justify="right", width=8)
    table.add_column("tolerance", width=12)
    table.add_column("verdict", width=7)
    for row in rows:
        check = row.worst
        shown = f"{check.what} ({row.num_tensors})" if row.num_tensors > 1 else check.what
        name = check.file.removesuffix(".safetensors")
        cells = (name, check.backend, shown, _number(check), str(check.limit), row.verdict)
        table.add_row(*(Text(cell) for cell in cells), style="bold red" if row.num_wrong else None)
    return table


def _number(check: Check) -> str:
    error = check.found.error
    if check.limit.kind == "exact" and math.isfinite(error):
        return f"{error:.0f}"
    return f"{error:.1e}" if math.isfinite(error) else "inf"


def _print_differences(console: Console, checks: Sequence[Check]) -> None:
    if checks:
        console.print("\nout of tolerance", style="bold red")
    for check in checks:
        note = f"; {check.found.note}" if check.found.note else ""
        text = f"  {check.file}: {check.tensor} ({check.backend}): {_number(check)}, accepted {check.limit}{note}"
        console.print(text, markup=False, soft_wrap=False)


def _print_not_run(console: Console, items: Iterable[NotRun]) -> None:
    """By reason and file; what a file lacks through several back ends is said once."""
    by_reason: dict[str, dict[tuple[str, str], list[str]]] = {}
    for item in items:
        by_reason.setdefault(item.reason, {}).setdefault((item.file, item.backend), []).append(item.what)
    if by_reason:
        console.print("\nnot compared", style="bold")
    for reason, files in by_reason.items():
        console.print(f"  {reason}", markup=False)
        merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for (file, backend), parts in files.items():
            merged.setdefault((file, tuple(part for part in parts if part)), []).append(backend)
        for (file, names), backends in merged.items():
            shown = f": {', '.join(names)}" if names else ""
            line = Text(f"    {file} ({', '.join(backends)}){shown}", style="dim")
            console.print(line)
