"""Greedy, temperature and top-p."""

from __future__ import annotations

import numpy as np
import pytest

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.sampling import Sampler, SamplingConfig, keep_top_p

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))


def draws(config: SamplingConfig, count: int) -> list[int]:
    sampler = Sampler(config)
    return [sampler.sample(LOGITS) for _ in range(count)]


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert Sampler(SamplingConfig()).sample(np.array([0.0, 2.0, 2.0, 1.0], dtype=np.float32)) == 1


def test_a_seed_repeats_and_another_differs() -> None:
    first = draws(SamplingConfig(temperature=1.0, seed=3), 50)
    assert first == draws(SamplingConfig(temperature=1.0, seed=3), 50)
    assert first != draws(SamplingConfig(temperature=1.0, seed=4), 50)


def test_temperature_one_draws_from_the_distribution() -> None:
    counts = np.bincount(draws(SamplingConfig(temperature=1.0, seed=1), 20_000), minlength=4) / 20_000
    # Four standard deviations of a binomial count.
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=4 * np.sqrt(0.25 / 20_000))


def test_low_temperature_sharpens() -> None:
    counts = np.bincount(draws(SamplingConfig(temperature=0.5, seed=1), 20_000), minlength=4) / 20_000
    squares = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    np.testing.assert_allclose(counts, squares / squares.sum(), atol=4 * np.sqrt(0.25 / 20_000))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {0}), (0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: set[int]) -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    assert set(np.flatnonzero(keep_top_p(probabilities, top_p))) == kept
    assert set(draws(SamplingConfig(temperature=1.0, top_p=top_p, seed=2), 2_000)) == kept


def test_nan_is_named() -> None:
    with pytest.raises(RequestError, match="NaN at token 2"):
        Sampler(SamplingConfig()).sample(np.array([0.0, 1.0, np.nan], dtype=np.float32))


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}])
def test_refusals(values: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="expected"):
        SamplingConfig(**values)  # type: ignore[arg-type]
