"""Distances: what counts as equal, what as an error, and how limits print."""

from __future__ import annotations

import math

import pytest
import torch

from engram_trt.export.accuracy.golden_tolerance import (
    BLOCKS,
    EXACT,
    LOGITS,
    MIXES,
    OPS_F32,
    STREAMS,
    VOID_MARGINS,
    Limit,
    distance,
)

ONE_TENTH = Limit(kind="close", atol=0.1)


def test_the_readme_limits() -> None:
    assert (OPS_F32.rtol, OPS_F32.atol) == (1e-5, 2e-6)
    assert (STREAMS.atol, LOGITS.atol, MIXES.atol) == (2e-3, 2e-3, 1e-4)
    assert {mode: limit.rms for mode, limit in BLOCKS.items()} == {"f32_q": 5e-3, "bf16": 0.1, "bf16_q": 0.1}
    assert VOID_MARGINS["f32_q"] == 1e-4
    assert VOID_MARGINS["bf16_q"] == VOID_MARGINS["bf16"] == 1e-2
    assert VOID_MARGINS["f32"] == 0


@pytest.mark.parametrize(("gap", "ok"), [(0.09, True), (0.11, False), (-0.11, False)])
def test_close_takes_the_largest_difference(gap: float, ok: bool) -> None:
    found = distance(torch.tensor([1.0, 2.0 + gap]), torch.tensor([1.0, 2.0]), ONE_TENTH)
    assert found.ok is ok
    assert found.error == pytest.approx(abs(gap), rel=1e-5)


def test_a_relative_limit_grows_with_the_reference() -> None:
    limit = Limit(kind="close", rtol=0.01)
    assert distance(torch.tensor([100.9]), torch.tensor([100.0]), limit).ok
    assert not distance(torch.tensor([1.09]), torch.tensor([1.0]), limit).ok


def test_rms_is_relative_to_the_reference() -> None:
    found = distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), Limit(kind="rms", rms=0.2))
    assert found.error == pytest.approx(0.1)
    assert found.ok
    assert not distance(torch.tensor([0.1]), torch.tensor([0.0]), Limit(kind="rms", rms=0.2)).ok


def test_nan_and_infinity_must_stand_in_the_same_places() -> None:
    strange = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert distance(strange, strange.clone(), ONE_TENTH).ok
    assert distance(strange, strange.clone(), EXACT).ok
    for index, other in ((0, 0.0), (1, -math.inf), (2, math.nan), (3, math.inf)):
        changed = strange.clone()
        changed[index] = other
        assert not distance(changed, strange, ONE_TENTH).ok
        assert distance(changed, strange, EXACT).error == 1


def test_exact_counts_and_int64_keeps_every_bit() -> None:
    large = torch.tensor([2**62 + 1, 5], dtype=torch.int64)
    found = distance(torch.tensor([2**62, 5], dtype=torch.int64), large, EXACT)
    assert (found.error, found.ok) == (1, False)


def test_another_shape_is_a_difference() -> None:
    found = distance(torch.zeros(2, 3), torch.zeros(3, 2), ONE_TENTH)
    assert not found.ok
    assert "[2, 3]" in found.note
    assert "[3, 2]" in found.note


def test_limits_print_short() -> None:
    assert str(OPS_F32) == "2e-06+1e-05r"
    assert str(EXACT) == "exact"
    assert str(BLOCKS["f32_q"]) == "rms 0.005"
