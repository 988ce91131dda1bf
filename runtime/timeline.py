"""When every stage of a step ran, on which device and rank: for accounting, and as a Chrome trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("compute", "wait", "transfer", "bubble")
"""What a device does: runs a stage; waits for Engram rows; packs, sends, takes or copies tensors; has no work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run: nanoseconds of the wall clock, so that processes and hosts share an axis as far as their clocks do."""

    name: str
    rank: int
    track: str
    start_ns: int
    end_ns: int

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        if self.name in ("idle", "receive"):
            return "bubble"
        if self.name.endswith(":wait"):
            return "wait"
        moves = self.name in ("send", "take", "fetch") or self.name.endswith(":transfer")
        return "transfer" if moves else "compute"


class Timeline:
    """Spans of one process; nothing is recorded until `is_on` is set.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.is_on = rank, False
        self.spans: list[Span] = []
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def add(self, name: str, track: str, started: int, ended: int) -> None:
        """Add a run by its `perf_counter_ns` times."""
        start, end = started + self._offset_ns, ended + self._offset_ns
        self.spans.append(Span(name=name, rank=self.rank, track=track, start_ns=start, end_ns=end))

    def to_json(self) -> str:
        """All spans as one line."""
        return json.dumps([[span.name, span.track, span.start_ns, span.end_ns] for span in self.spans])

    @staticmethod
    def spans_of(text: str, rank: int) -> list[Span]:
        """The inverse of `to_json`, for the spans of another rank."""
        return [
            Span(name=str(name), rank=rank, track=str(track), start_ns=int(start), end_ns=int(end))
            for name, track, start, end in json.loads(text)
        ]


def write_chrome_trace(spans: Iterable[Span], path: Path) -> None:
    """Write a file that chrome://tracing and Perfetto open: a process per rank, a thread per device."""
    ordered = sorted(spans, key=lambda span: span.start_ns)
    origin = ordered[0].start_ns if ordered else 0
    tracks = {key: number for number, key in enumerate(dict.fromkeys((s.rank, s.track) for s in ordered))}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in ordered})
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": track or "main"}}
        for (rank, track), number in tracks.items()
    ]
    events += [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": span.rank,
            "tid": tracks[span.rank, span.track],
            "ts": (span.start_ns - origin) / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
        }
        for span in ordered
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def accounting(spans: Iterable[Span], wall_ns: int) -> dict[str, dict[str, float]]:
    """What every device did, in milliseconds; what is left of the wall time is bubble.

    Args:
        spans: of one measurement.
        wall_ns: how long that took.

    Returns:
        "rank R" or "rank R device" -> kind -> ms.
    """
    totals: dict[str, dict[str, float]] = {}
    for span in spans:
        place = f"rank {span.rank} {span.track}".strip()
        kinds = totals.setdefault(place, dict.fromkeys(KINDS, 0.0))
        if span.kind != "bubble":
            kinds[span.kind] += (span.end_ns - span.start_ns) / 1e6
    for kinds in totals.values():
        kinds["bubble"] = max(0.0, wall_ns / 1e6 - sum(kinds.values()))
    return {place: {kind: round(ms, 3) for kind, ms in kinds.items()} for place, kinds in sorted(totals.items())}


def stage_milliseconds(spans: Iterable[Span]) -> Mapping[str, float]:
    """Run name -> ms in all its runs together."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name] = totals.get(span.name, 0.0) + (span.end_ns - span.start_ns) / 1e6
    return {name: round(ms, 3) for name, ms in totals.items()}
