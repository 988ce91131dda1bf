"""Small charts as inline SVG; log scales for errors, one unit of the drawing is about a pixel on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480
_LEFT, _RIGHT = 112, 72
_ROW = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One error and its limit (0: exact).

    Args:
        label: in front of the bar.
        value: not below 0; infinite for what is no number.
        limit: accepted.
        over: whether something is out of its limit.
    """

    label: str
    value: float
    limit: float
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parts of a whole.

    Args:
        label: in front of the bar.
        same, tied, total: counts; what is neither same nor tied is different.
    """

    label: str
    same: int
    tied: int
    total: int


class _LogScale:
    """Powers of ten from the smallest to the largest value, both rounded outwards."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        found = [value for value in values if 0 < value < math.inf]
        self.low = math.floor(math.log10(min(found))) if found else -1
        self.high = max(math.ceil(math.log10(max(found))) if found else 0, self.low + 1)
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        if value <= 0:
            return self._start
        power = min(max(math.log10(value), self.low), self.high) if math.isfinite(value) else self.high
        return self._start + (power - self.low) / (self.high - self.low) * (self._stop - self._start)

    def ticks(self) -> list[int]:
        step = max((self.high - self.low) // 5, 1)
        return list(range(self.low, self.high + 1, step))


def error_bars(bars: Sequence[Bar]) -> str:
    """Errors by stage, with the limit of each as a mark."""
    height = len(bars) * _ROW + 26
    inexact = [bar for bar in bars if bar.limit]
    scale = _LogScale([value for bar in inexact for value in (bar.value, bar.limit)], _LEFT, WIDTH - _RIGHT)
    parts = [_vertical_grid(scale, height)]
    for index, bar in enumerate(bars):
        top = index * _ROW
        end = scale(bar.value) if bar.limit else (WIDTH - _RIGHT if bar.over else _LEFT)
        parts.append(_text(_LEFT - 6, top + 15, bar.label, "end"))
        kind = "over" if bar.over else "bar"
        parts.append(_rect(_LEFT, top + 4, max(end - _LEFT, 1), _ROW - 8, kind))
        if bar.limit:
            place = scale(bar.limit)
            parts.append(_line(place, top + 1, place, top + _ROW - 1, "limit"))
        exact = f"{bar.value:.0f} differ" if bar.over else "exact"
        shown = _short(bar.value) if bar.limit else exact
        parts.append(_text(WIDTH - _RIGHT + 6, top + 15, shown))
    return _svg(height, "error by stage", parts)


def error_by_position(errors: Sequence[float], most: int = 240) -> str:
    """Largest error at each position; neighbours are joined where there are more than fit."""
    count = len(errors)
    joined = max(math.ceil(count / most), 1)
    points = [(start, max(errors[start : start + joined])) for start in range(0, count, joined)]
    height, left, bottom = 200, 56, 170
    scale = _LogScale([value for _, value in points], bottom, 10)
    width = (WIDTH - left - 8) / max(len(points), 1)
    parts = []
    for power in scale.ticks():
        level = scale(10.0**power)
        parts.append(_line(left, level, WIDTH - 8, level, "grid"))
        parts.append(_text(left - 6, level + 4, f"1e{power}", "end", "soft"))
    for index, (_, value) in enumerate(points):
        top = scale(value)
        kind = "over" if not math.isfinite(value) else "bar"
        x = left + index * width
        parts.append(_rect(x, top, max(width - 0.3, 0.5), max(bottom - top, 0), kind))
    for share in (0.0, 0.5, 1.0):
        position = round(share * max(count - 1, 0))
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        parts.append(_text(left + share * (WIDTH - left - 8), bottom + 18, str(position), anchor, "soft"))
    return _svg(height, "error by position", parts)


def agreement_bars(shares: Sequence[Share]) -> str:
    """How often both sides chose the same; ties and differences in colours of their own."""
    height = len(shares) * _ROW + 4
    full = WIDTH - _LEFT - _RIGHT
    parts = []
    for index, share in enumerate(shares):
        top, x = index * _ROW, float(_LEFT)
        parts.append(_text(_LEFT - 6, top + 15, share.label, "end"))
        different = share.total - share.same - share.tied
        for count, kind in ((share.same, "same"), (share.tied, "tied"), (different, "over")):
            width = full * count / max(share.total, 1)
            if width > 0:
                parts.append(_rect(x, top + 4, width, _ROW - 8, kind))
            x += width
        percent = 100 * (share.same + share.tied) / max(share.total, 1)
        parts.append(_text(WIDTH - _RIGHT + 6, top + 15, f"{percent:.4g} %"))
    return _svg(height, "agreement of choices", parts)


def _vertical_grid(scale: _LogScale, height: int) -> str:
    parts = []
    for power in scale.ticks():
        place = scale(10.0**power)
        parts.append(_line(place, 0, place, height - 22, "grid"))
        parts.append(_text(place, height - 6, f"1e{power}", "middle", "soft"))
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "no number"


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text{classes} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
