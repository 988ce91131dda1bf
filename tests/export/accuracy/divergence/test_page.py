"""The HTML page: whole in itself, true to the report, readable in a browser at any width and on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from small_model import small_config

from engram_trt.export.accuracy.divergence.charts import Bar, Share, agreement_bars, error_bars, error_by_position
from engram_trt.export.accuracy.divergence.deviation import Coordinate, Deviation
from engram_trt.export.accuracy.divergence.findings import (
    Agreement,
    Finding,
    Outcome,
    PointFinding,
    SelectionChange,
    Track,
)
from engram_trt.export.accuracy.divergence.limits import EXACT, Limit, Limits
from engram_trt.export.accuracy.divergence.page import page
from engram_trt.export.accuracy.divergence.report import ComparisonReport

LIMIT = Limit(value=1e-4, origin="hand-set")


def report() -> ComparisonReport:
    """A long report: forty layers, a thousand positions, names that must be escaped."""
    outcome = Outcome(level="chain", backend="tensorrt", reference="torch <&>", steps=9, tokens=1000)
    errors = np.geomspace(1e-7, 3e-4, 1000)
    for layer in range(40):
        track = Track(limit=LIMIT)
        found = Deviation(kind="value", errors=errors * (layer + 1) / 40, wrong=errors * (layer + 1) / 40 > 1e-4)
        track.add(found, found.wrong, np.zeros_like(found.wrong), list(range(1000)))
        outcome.tracks[f"block_{layer:02d}.hidden_states_out"] = track
        outcome.agreements[f"block_{layer:02d}.experts"] = Agreement(same=990, tied=6, compared=1000)
    outcome.findings.append(
        Finding(
            level="chain",
            backend="tensorrt",
            stage="block_20",
            tensor="topk_indices",
            kind="exact",
            error=3.0,
            limit=EXACT,
            num_wrong=7,
            num_tokens=1000,
            cause="own",
            worst=(Coordinate(row=1, position=77, index=(3,), reference=5.0, found=float("nan")),),
            selections=(
                SelectionChange(name="topk_indices", row=1, position=77, only_reference=(5, 6), only_found=(8,)),
            ),
            point=PointFinding(op="Indexer", tensor="topk_indices", error=3.0, note="alone"),
        )
    )
    return ComparisonReport(
        artifact="/somewhere/with/a/very/long/path/that/has/no/space/in/it/at/all/artefact",
        digest="0" * 64,
        prompts_from="a file",
        prompts_digest="1" * 64,
        num_prompts=64,
        limits=Limits(),
        config=small_config(),
        outcomes=(outcome,),
    )


class _Checker(HTMLParser):
    """Notes tags left open, and everything that would be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_the_page_is_whole_in_itself() -> None:
    text = page(report())
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.fetched == []
    assert not re.search(r"https?:|@import|url\(|\$\w", text)


def test_the_page_says_what_the_report_says() -> None:
    text = page(report())
    assert "torch &lt;&amp;&gt; differ" in text
    for part in ("First divergence: block_20, topk_indices", "Indexer", "chose 5, 6", "row 1, position 77 [3]", "nan"):
        assert part in text, part
    assert text.count("<svg") == 3


def test_bars_are_as_long_as_their_logarithm() -> None:
    svg = error_bars(
        [
            Bar(label="a", value=1e-6, limit=1e-4, over=False),
            Bar(label="b", value=1e-5, limit=1e-4, over=False),
            Bar(label="c", value=1e-4, limit=1e-4, over=False),
            Bar(label="d", value=0.0, limit=0.0, over=False),
        ]
    )
    first, second, third, exact = (float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', svg))
    assert first == exact == 1.0
    assert third == pytest.approx(2 * second, abs=0.1)
    assert "exact" in svg


def test_positions_are_joined_and_none_is_lost() -> None:
    errors = [1e-6] * 1000
    errors[777] = 1e-2
    svg = error_by_position(errors)
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]
    assert len(heights) <= 240
    assert sum(height > 100 for height in heights) == 1
    assert heights.index(max(heights)) == 777 // 5


def test_shares_fill_their_bar() -> None:
    svg = agreement_bars([Share(label="x", same=50, tied=25, total=100)])
    same, tied, different = (float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', svg))
    assert same == pytest.approx(2 * tied)
    assert tied == pytest.approx(different)
    assert "75 %" in svg


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def chromium(*arguments: str) -> str:
    """Run Chromium without a window; what it prints."""
    name = browser()
    if name is None:
        print("no chromium on this machine: the page was not looked at in a browser (Debian: apt install chromium)")
        pytest.skip("no chromium")
    command = [name, "--headless", "--no-sandbox", "--disable-gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.large
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_screen(width: int, tmp_path: Path) -> None:
    """A probe, in a copy of the page, writes measures into the title; text in charts stays readable on a phone."""
    probe = (
        "<script>document.title = [document.documentElement.scrollWidth <= window.innerWidth,"
        "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)) >= 8,"
        "document.querySelectorAll('svg rect').length > 100].join()</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(page(report()).replace("</body>", f"{probe}</body>"), encoding="utf-8")
    dom = chromium(f"--window-size={width},900", "--dump-dom", path.as_uri())
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    assert title[1] == "true,true,true"


@pytest.mark.large
def test_it_prints(tmp_path: Path) -> None:
    path, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    path.write_text(page(report()), encoding="utf-8")
    chromium(f"--print-to-pdf={printed}", path.as_uri())
    assert printed.read_bytes().startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) <= 8
