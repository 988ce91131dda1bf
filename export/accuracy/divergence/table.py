"""A comparison on a terminal, 100 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram_trt.export.accuracy.divergence.findings import Finding, Outcome
from engram_trt.export.accuracy.divergence.report import ComparisonReport, by_stage

WIDTH = 100
_CAUSES = {
    "own": "the stage's own computation: it differs on the reference's inputs as well",
    "came in": "came in: on the reference's inputs the stage is within its limit",
    "input": "an input that the session supplies",
    "unknown": "",
}


def print_report(report: ComparisonReport, console: Console) -> None:
    """Table, first divergence, notes and verdict of every back end."""
    for outcome in report.outcomes:
        console.print(_table(outcome))
        if outcome.token_scores:
            _scores(outcome, console)
        for number, finding in enumerate(outcome.findings[:1]):
            console.print()
            _print_finding(finding, number, console)
        if len(outcome.findings) > 1:
            places = ", ".join(dict.fromkeys(finding.stage for finding in outcome.findings[1:]))
            console.print(Text(f"  also, each on the reference's inputs: {places}"))
        _print_ties(outcome, console)
        for note in dict.fromkeys(outcome.notes):
            console.print(Text(f"  {note}", style="dim"))
        verdict = "agree" if outcome.ok else "DIFFER"
        text = f"{outcome.backend} and {outcome.reference} {verdict}: {outcome.tokens} tokens in {outcome.steps} steps"
        console.print(Text(f"\n{text}, {report.num_prompts} prompts", style="bold" if outcome.ok else "bold red"))
    if any(track.limit.origin == "hand-set" for outcome in report.outcomes for track in outcome.tracks.values()):
        console.print(Text("* a limit set by hand; --calibrate measures the model's own noise", style="dim"))


def _table(outcome: Outcome) -> Table:
    title = f"{outcome.backend} against {outcome.reference}, level {outcome.level}"
    table = Table(box=None, pad_edge=False, width=WIDTH, title=title, title_justify="left")
    table.add_column("op" if outcome.level == "op" else "stage", width=18, no_wrap=True)
    table.add_column("closest to its limit", ratio=1, overflow="fold")
    table.add_column("compared", justify="right", width=9)
    table.add_column("worst", justify="right", width=8)
    table.add_column("limit", justify="right", width=8)
    table.add_column("out", justify="right", width=7)
    for stage, (tensor, track) in by_stage(outcome.tracks).items():
        wrong = sum(item.wrong for key, item in outcome.tracks.items() if key.startswith(f"{stage}."))
        cells = (
            stage,
            tensor,
            str(track.compared),
            _error(track.worst, track.limit.value),
            str(track.limit),
            str(wrong),
        )
        table.add_row(*(Text(cell) for cell in cells), style="bold red" if wrong else None)
    return table


def _error(value: float, limit: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}" if limit else f"{value:.0f}"


def _print_finding(finding: Finding, number: int, console: Console) -> None:
    head = (
        f"first divergence: {finding.stage}, {finding.tensor}" if number == 0 else f"{finding.stage}, {finding.tensor}"
    )
    console.print(Text(head, style="bold red"))
    step = f" in step {finding.step}" if finding.step >= 0 else ""
    error = _error(finding.error, finding.limit.value)
    console.print(
        Text(f"  {finding.num_wrong} of {finding.num_tokens} tokens{step}: {error}, accepted {finding.limit}")
    )
    if finding.inputs:
        console.print(Text(f"  on inputs made from real ones: {finding.inputs}"))
    if finding.kind == "not finite":
        console.print(Text("  NaN or infinity"))
    if _CAUSES[finding.cause]:
        console.print(Text(f"  {_CAUSES[finding.cause]}"))
    if finding.point is not None:
        point = finding.point
        console.print(Text(f"  op: {point.op}, {point.tensor}: {_error(point.error, 1)} ({point.note})", style="bold"))
    for place in finding.worst:
        index = f"[{', '.join(map(str, place.index))}]" if place.index else ""
        where = f"row {place.row}, position {place.position}{index}"
        console.print(Text(f"  {where}: {place.reference:.7g} in the reference, {place.found:.7g} here"))
    for change in finding.selections:
        left, right = _list(change.only_reference), _list(change.only_found)
        where = f"row {change.row}, position {change.position}"
        console.print(Text(f"  {change.name} of {where}: only the reference chose {left}, only this side {right}"))
    if finding.also:
        console.print(Text(f"  with it: {', '.join(finding.also)}"))


def _list(values: Iterable[int], most: int = 6) -> str:
    shown = list(values)
    return ", ".join(map(str, shown[:most])) + (", ..." if len(shown) > most else "") if shown else "none"


def _print_ties(outcome: Outcome, console: Console) -> None:
    if outcome.ties:
        total = sum(outcome.ties.values())
        stages = ", ".join(f"{stage} {count}" for stage, count in outcome.ties.items())
        console.print(Text(f"  ties excused: {total} tokens ({stages})", style="dim"))


def _scores(outcome: Outcome, console: Console) -> None:
    names = {
        "greedy_agreement": "likeliest token the same",
        "top10_overlap": "overlap of the ten likeliest",
        "kl_mean": "KL divergence, mean (nats)",
        "kl_max": "KL divergence, largest",
        "perplexity_reference": "perplexity, reference",
        "perplexity_found": "perplexity, here",
    }
    console.print()
    for key, value in outcome.token_scores.items():
        if key in names:
            console.print(Text(f"  {names[key]:<32}{value:.6g}"))
