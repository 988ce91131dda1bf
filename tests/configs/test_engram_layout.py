"""Hash constants against the golden layouts, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from engram_trt.configs import engram_layout
from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset

HASH = Path(__file__).parents[1] / "data" / "golden" / "hash"
ARRAYS = ("primes", "offsets", "multipliers")


def test_the_released_layout_is_the_golden_one() -> None:
    golden = load_file(HASH / "layout.safetensors")
    layout = EngramLayout.from_config(model_preset("released"))
    for key in ARRAYS:
        np.testing.assert_array_equal(getattr(layout, key), golden[key])
        assert getattr(layout, key).dtype == np.int64
    assert layout.num_embeddings == (384_006_168, 384_016_682)
    assert layout.layer_ids == (1, 14)


def test_the_released_layout_agrees_with_its_text_form() -> None:
    golden = json.loads((HASH / "layout.json").read_text())
    layout = EngramLayout.derive(
        golden["layer_ids"],
        golden["engram_vocab_size"],
        golden["max_ngram"],
        golden["n_heads"],
        golden["compressed_vocab"],
    )
    assert layout.primes.tolist() == golden["primes[layer][ngram-2][head]"]
    assert layout.multipliers.tolist() == golden["multipliers[layer][lookback]"]
    assert list(layout.num_embeddings) == golden["totals"]


@pytest.mark.parametrize("name", ["s0", "s1", "s2"])
def test_small_layouts(name: str) -> None:
    golden = {
        key.removeprefix(f"{name}."): value
        for key, value in load_file(HASH / "small_layouts.safetensors").items()
        if key.startswith(f"{name}.")
    }
    search_start, classes = golden["vocab_size_arg"].tolist()
    _, sizes, heads = golden["primes"].shape
    layout = EngramLayout.derive(golden["layer_ids"].tolist(), search_start, sizes + 1, heads, classes)
    for key in ARRAYS:
        np.testing.assert_array_equal(getattr(layout, key), golden[key])


def test_rows_of_the_small_models() -> None:
    # The row counts that the reference's own configs state for a search from 50 and from 31.
    assert EngramLayout.derive([1, 4], 50, 4, 2, 200).num_embeddings == (384, 552)
    assert EngramLayout.derive([0, 3], 31, 3, 2, 200).num_embeddings == (152, 220)


def test_products_of_ids_and_multipliers_stay_below_2_to_63() -> None:
    for classes in (2, 3, 855, 99_092):
        layout = EngramLayout.derive([1, 14, 39], 1000, 4, 2, classes)
        assert max(layout.multipliers.reshape(-1).tolist()) * (classes - 1) < 2**63
        assert (layout.multipliers % 2 == 1).all()


def test_arrays_cannot_be_changed() -> None:
    layout = EngramLayout.from_config(model_preset("tiny"))
    with pytest.raises(ValueError, match="read-only"):
        layout.primes[0, 0, 0] = 4


def test_a_model_without_engram_has_an_empty_layout() -> None:
    flat = model_preset("tiny").to_flat_dict() | {"engram_layer_ids": [], "engram_num_embeddings": []}
    layout = EngramLayout.from_config(ModelConfig.from_dict(flat))
    assert layout.num_embeddings == ()
    assert layout.multipliers.shape[0] == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**40))
def test_primes_are_those_of_another_library(start: int) -> None:
    primes = engram_layout._consecutive_primes(start, 3)
    expected, cursor = [], start - 1
    for _ in range(3):
        cursor = sympy.nextprime(cursor)
        expected.append(cursor)
    assert primes == tuple(expected)


@pytest.mark.parametrize("composite", [1, 4, 561, 1_373_653, 3_215_031_751, 3_825_123_056_546_413_051])
def test_numbers_that_fool_weak_tests_are_no_primes(composite: int) -> None:
    """Carmichael numbers and strong pseudoprimes to small bases."""
    assert composite not in engram_layout._consecutive_primes(composite, 1)
