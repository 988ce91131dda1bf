"""Distances, places and ties on small arrays, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from small_model import small_config

from engram_trt.configs.tensors import TensorSpec
from engram_trt.export.accuracy.divergence.deviation import deviation, root_mean_square, worst_coordinates
from engram_trt.export.accuracy.divergence.limits import EXACT, Limit, Limits
from engram_trt.export.accuracy.divergence.places import Places, StepPlaces
from engram_trt.export.accuracy.divergence.ties import Choices

TENTH = Limit(value=0.1, origin="hand-set")


def places(count: int) -> Places:
    rows = np.zeros(count, dtype=np.int64)
    return Places(rows=rows, slots=np.arange(count), positions=np.arange(count) + 10)


def test_an_error_is_relative_to_the_root_mean_square() -> None:
    reference = np.array([[3.0, 4.0], [0.0, 5.0]], dtype=np.float32)
    found = reference + np.array([[0.0, 0.5], [0.1, 0.0]], dtype=np.float32)
    result = deviation(reference, found, TENTH)
    assert root_mean_square(reference) == pytest.approx((50 / 4) ** 0.5)
    np.testing.assert_allclose(result.errors, [0.5 / 12.5**0.5, 0.1 / 12.5**0.5], rtol=1e-5)
    assert result.wrong.tolist() == [True, False]


def test_an_error_in_zeros_counts_as_it_is() -> None:
    assert deviation(np.zeros((1, 2), np.float32), np.full((1, 2), 0.25, np.float32), TENTH).worst == 0.25


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_what_is_no_number_is_always_a_difference(value: float, sides: tuple[bool, bool]) -> None:
    arrays = [np.ones((3, 2), dtype=np.float32) for _ in range(2)]
    for array, has in zip(arrays, sides, strict=True):
        if has:
            array[1, 1] = value
    result = deviation(*arrays, TENTH)
    assert result.kind == "not finite"
    assert result.wrong.tolist() == [False, True, False]
    (worst,) = worst_coordinates(*arrays, places(3), result.wrong)
    assert (worst.position, worst.index) == (11, (1,))


def test_ids_are_exact_and_shapes_differ() -> None:
    result = deviation(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [4, 3]]), EXACT)
    assert result.errors.tolist() == [0, 2]
    assert deviation(np.zeros((2, 3)), np.zeros((2, 4)), TENTH).kind == "shape"


def test_the_worst_comes_first_with_both_values() -> None:
    reference = np.zeros((2, 2, 3), dtype=np.float32)
    found = reference.copy()
    found[0, 1, 2], found[1, 0, 1] = 0.5, -2
    first, second = worst_coordinates(reference, found, places(2), np.array([True, True]))
    assert (first.position, first.index, first.reference, first.found) == (11, (0, 1), 0, -2)
    assert (second.position, second.index, second.found) == (10, (1, 2), 0.5)


def test_measured_limits_come_before_hand_set_ones() -> None:
    spec = TensorSpec(name="pre_mix_out", dtype="float32", shape=("batch", "tokens", 4), role="activation")
    limits = Limits(measured={"block_00.pre_mix_out": 3e-6})
    assert limits.of("block_00", spec) == Limit(value=3e-6, origin="measured")
    assert limits.of("block_01", spec).origin == "hand-set"
    assert limits.of("block_00", TensorSpec(name="ids", dtype="int64", shape=("batch",), role="activation")) == EXACT


def spec_of(tensor: str, owner: int) -> TensorSpec:
    return TensorSpec(
        name=f"{tensor}_out", tensor=tensor, dtype="float32", shape=("batch", "x", 8), role="state", owner=owner
    )


def test_live_slots_of_a_ring_and_of_entries() -> None:
    """Window 5; row 0 has 13 tokens, row 2 has 3; layer 2 compresses pairs, layer 4 single tokens."""
    step = StepPlaces(small_config(), {0: 12, 2: 0}, {0: 1, 2: 3})
    ring = step.places(spec_of("window_kv", 0), (3, 10, 8))
    assert ring.positions.tolist() == [8, 9, 10, 11, 12, 0, 1, 2]
    assert ring.slots.tolist() == [8, 9, 0, 1, 2, 0, 1, 2]
    assert ring.rows.tolist() == [0] * 5 + [2] * 3
    pairs = step.places(spec_of("compressed_kv", 2), (3, 32, 8))
    assert pairs.slots.tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert pairs.positions.tolist() == [0, 2, 4, 6, 8, 10, 0]
    assert step.places(spec_of("index_keys", 4), (3, 64, 8)).slots.tolist() == [*range(13), 0, 1, 2]
    assert step.places(spec_of("kv_state", 2), (3, 14, 8)).positions.tolist() == [11, 12, 1, 2]
    assert step.tokens.positions.tolist() == [12, 0, 1, 2]
    assert step.selected.positions.tolist() == [12, 2]


SCORES = np.array([[[0.5, 0.9, 0.5 + 1e-7, -np.inf], [0.5, 0.9, 0.7, -np.inf]]], dtype=np.float32)


def test_a_list_is_tied_where_scores_are_as_good_as_equal() -> None:
    choices = Choices(scores={"index_scores": SCORES}, experts_per_token=1)
    reference = np.array([[1, 2], [1, 2]], dtype=np.int32)
    found = np.array([[0, 1], [0, 1]], dtype=np.int32)
    assert choices.lists_tied("topk_indices", reference, found, places(2), 1e-5).tolist() == [True, False]


def test_a_missing_or_unseen_entry_is_no_tie() -> None:
    choices = Choices(scores={"index_scores": SCORES}, experts_per_token=1)
    reference = np.array([[1, 2], [1, 2]], dtype=np.int32)
    found = np.array([[-1, 1], [1, 3]], dtype=np.int32)
    assert choices.lists_tied("topk_indices", reference, found, places(2), 1.0).tolist() == [False, False]


def test_experts_are_tied_by_the_gap_of_the_last_chosen() -> None:
    scores = np.array([[[0.9, 0.5, 0.5 + 1e-7], [0.9, 0.5, 0.7]]], dtype=np.float32)
    assert Choices(scores={"experts": scores}, experts_per_token=2).experts_tied(places(2), 1e-5).tolist() == [
        True,
        False,
    ]
    assert not Choices(scores={"experts": scores}, experts_per_token=1).experts_tied(places(2), 1e-5).any()
    assert not Choices(scores={"experts": scores}, experts_per_token=3).experts_tied(places(2), 1.0).any()
