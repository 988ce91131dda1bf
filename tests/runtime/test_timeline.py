"""Spans: their kinds, the accounting, the trace file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram_trt.runtime.timeline import Span, Timeline, accounting, stage_milliseconds, write_chrome_trace

MS = 1_000_000


def span(name: str, rank: int, start: int, end: int, track: str = "") -> Span:
    return Span(name=name, rank=rank, track=track, start_ns=start * MS, end_ns=end * MS)


SPANS = [
    span("block_00", 0, 10, 14),
    span("block_01:wait", 0, 14, 15),
    span("send", 0, 15, 17),
    span("receive", 0, 17, 30),
    span("idle", 1, 0, 17),
    span("take", 1, 17, 18),
    span("hidden_states:transfer", 1, 18, 20),
    span("head", 1, 20, 29, "cuda:1"),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("head", "compute"),
        ("block_03:wait", "wait"),
        ("fetch", "transfer"),
        ("pre_mix:transfer", "transfer"),
        ("idle", "bubble"),
        ("receive", "bubble"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert span(name, 0, 0, 1).kind == kind


def test_what_is_not_accounted_for_is_bubble() -> None:
    assert accounting(SPANS, 40 * MS) == {
        "rank 0": {"compute": 4.0, "wait": 1.0, "transfer": 2.0, "bubble": 33.0},
        "rank 1": {"compute": 0.0, "wait": 0.0, "transfer": 3.0, "bubble": 37.0},
        "rank 1 cuda:1": {"compute": 9.0, "wait": 0.0, "transfer": 0.0, "bubble": 31.0},
    }
    assert stage_milliseconds([*SPANS, span("head", 0, 0, 1)])["head"] == 10.0


def test_nothing_is_lost_between_ranks() -> None:
    timeline = Timeline(rank=2)
    timeline.add("head", "cpu:1", 5, 9)
    (found,) = Timeline.spans_of(timeline.to_json(), 2)
    assert found == timeline.spans[0]
    assert found.end_ns - found.start_ns == 4


def test_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(SPANS, path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"rank 0", "rank 1", "main", "cuda:1"}
    (head,) = (event for event in events if event["name"] == "head")
    assert (head["pid"], head["ts"], head["dur"], head["cat"]) == (1, 20000.0, 9000.0, "compute")
    assert head["tid"] != next(event for event in events if event["name"] == "take")["tid"]
    write_chrome_trace([], path)
    assert json.loads(path.read_text())["traceEvents"] == []
