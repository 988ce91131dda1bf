"""A comparison as one HTML page: no scripts, nothing fetched, for a screen, a phone and paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from engram_trt.export.accuracy.divergence.charts import (
    Bar,
    Share,
    agreement_bars,
    error_bars,
    error_by_position,
)
from engram_trt.export.accuracy.divergence.findings import Finding, Outcome
from engram_trt.export.accuracy.divergence.report import ComparisonReport, by_stage

TEMPLATE = Path(__file__).resolve().parents[2] / "data" / "compare_page.html"
MOST_FINDINGS = 8

_CAUSES = {
    "own": "The stage's own computation: it differs on the reference's inputs as well.",
    "came in": "It came in: on the reference's inputs the stage is within its limit.",
    "input": "An input that the session supplies.",
    "unknown": "",
}


def page(report: ComparisonReport) -> str:
    """The whole page."""
    names = ", ".join(outcome.backend for outcome in report.outcomes)
    verdict = "agree" if report.exit_code == 0 else "differ"
    references = ", ".join(dict.fromkeys(outcome.reference for outcome in report.outcomes))
    facts = (
        f"{report.artifact} · artefact {report.digest[:12]} · {report.num_prompts} prompts from "
        f"{report.prompts_from} ({report.prompts_digest[:12]})"
    )
    body = "".join(part for outcome in report.outcomes for part in _outcome(outcome))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{names} and {references} {verdict}"), facts=escape(facts), body=body
    )


def _outcome(outcome: Outcome) -> Iterator[str]:
    yield f"<h2>{escape(outcome.backend)} against {escape(outcome.reference)}, level {outcome.level}</h2>"
    word, kind = ("agree", "good") if outcome.ok else ("differ", "bad")
    yield f'<p>They <span class="{kind}">{word}</span>: {outcome.tokens} tokens in {outcome.steps} steps.</p>'
    if outcome.findings:
        yield _finding(outcome.findings[0])
    if outcome.findings[1:]:
        yield "<p>Then, each on the reference's inputs:</p>"
        yield f"<ul>{''.join(_brief(finding) for finding in outcome.findings[1:MOST_FINDINGS])}</ul>"
    if len(outcome.findings) > MOST_FINDINGS:
        yield f"<p>{len(outcome.findings) - MOST_FINDINGS} more are in the JSON report.</p>"
    yield from _charts(outcome)
    yield _worst(outcome)
    if outcome.token_scores:
        scores = outcome.token_scores.items()
        rows = "".join(_row(escape(key.replace("_", " ")), f"{value:.6g}") for key, value in scores)
        yield f"<h3>Next tokens</h3><table>{rows}</table>"
    for note in dict.fromkeys(outcome.notes):
        yield f'<p class="soft">{escape(note)}</p>'


def _brief(finding: Finding) -> str:
    inputs = f" ({finding.inputs})" if finding.inputs else ""
    text = f"{finding.stage}, {finding.tensor}{inputs}: {finding.num_wrong} of {finding.num_tokens} tokens"
    return f"<li>{escape(text)}</li>"


def _finding(finding: Finding) -> str:
    parts = [f'<p><span class="bad">First divergence: {escape(finding.stage)}, {escape(finding.tensor)}</span></p>']
    shown = f"{finding.error:.2e}" if math.isfinite(finding.error) else "no number"
    parts.append(f"<p>{finding.num_wrong} of {finding.num_tokens} tokens: {shown}, accepted {finding.limit}.</p>")
    if finding.inputs:
        parts.append(f"<p>On inputs made from real ones: {escape(finding.inputs)}.</p>")
    if _CAUSES[finding.cause]:
        parts.append(f"<p>{_CAUSES[finding.cause]}</p>")
    if finding.point is not None:
        point = finding.point
        parts.append(f"<p>Op: <b>{escape(point.op)}</b>, {escape(point.tensor)} ({escape(point.note)})</p>")
    for change in finding.selections:
        left, right = (", ".join(map(str, ids)) or "none" for ids in (change.only_reference, change.only_found))
        where = f"row {change.row}, position {change.position}"
        parts.append(f"<p>{change.name}, {where}: only the reference chose {left}; only this side {right}.</p>")
    return f'<div class="box">{"".join(parts)}</div>'


def _charts(outcome: Outcome) -> Iterator[str]:
    bars = [
        Bar(
            label=stage,
            value=track.worst,
            limit=track.limit.value,
            over=any(item.wrong for key, item in outcome.tracks.items() if key.startswith(f"{stage}.")),
        )
        for stage, (_, track) in by_stage(outcome.tracks).items()
    ]
    if bars:
        caption = "Error of the tensor closest to its limit, relative to its root mean square; dashed: the limit."
        yield _figure("Error by layer", error_bars(bars), caption)
    positions = _by_position(outcome)
    if positions:
        caption = "Largest error of any float tensor at each position of a row."
        yield _figure("Error by position", error_by_position(positions), caption)
    shares = [
        Share(label=_choice(key), same=item.same, tied=item.tied, total=item.compared)
        for key, item in outcome.agreements.items()
        if item.compared
    ]
    if shares:
        caption = "Tokens for which both sides chose the same: green; a tie: yellow; something else: red."
        yield _figure("Agreement of experts, entries and candidate blocks", agreement_bars(shares), caption)


def _choice(key: str) -> str:
    stage, _, name = key.partition(".")
    return f"{stage.removeprefix('block_')} {name.removesuffix('_indices').replace('candidate_', '')}"


def _by_position(outcome: Outcome) -> list[float]:
    tracks = [track.by_position for track in outcome.tracks.values() if track.limit.value and track.by_position.size]
    if not tracks:
        return []
    longest = max(len(track) for track in tracks)
    stacked = np.stack([np.pad(track, (0, longest - len(track))) for track in tracks])
    return [float(value) for value in stacked.max(axis=0)]


def _worst(outcome: Outcome) -> str:
    rows = []
    for finding in outcome.findings[:MOST_FINDINGS]:
        for place in finding.worst:
            index = f" [{', '.join(map(str, place.index))}]" if place.index else ""
            where = f"row {place.row}, position {place.position}{index}"
            name = f"{finding.stage} {finding.tensor}"
            rows.append(_row(escape(name), where, f"{place.reference:.6g}", f"{place.found:.6g}"))
    if not rows:
        return ""
    head = '<tr><th>tensor</th><th>place</th><th class="n">reference</th><th class="n">here</th></tr>'
    return f'<h3>Worst places</h3><div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _row(*cells: str) -> str:
    split = 1 if len(cells) == 2 else 2
    shown = [f"<td>{cell}</td>" for cell in cells[:split]] + [f'<td class="n">{cell}</td>' for cell in cells[split:]]
    return f"<tr>{''.join(shown)}</tr>"


def _figure(title: str, svg: str, caption: str) -> str:
    return f"<h3>{title}</h3><figure>{svg}<figcaption>{caption}</figcaption></figure>"
