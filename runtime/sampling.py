"""From logits to a token: greedy, temperature, top-p; reproducible by seed (spec 4, "Sampling")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen.

    Args:
        temperature: 0 for greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        seed: of the random numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            _refuse("temperature", self.temperature, "0 or more")
        if not 0 < self.top_p <= 1:
            _refuse("top-p", self.top_p, "above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            _refuse("seed", self.seed, "0..2^63-1")


def _refuse(name: str, value: float, expected: str) -> None:
    raise RequestError(name, found=f"{value}", expected=expected, remedy="Give another value.")


class Sampler:
    """Draws tokens for one answer; two samplers with the same config draw the same."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self._random = np.random.default_rng(config.seed)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose a token.

        Args:
            logits: [vocab_size] float32.

        Raises:
            RequestError: a logit is NaN; the model or its weights are damaged.
        """
        if np.isnan(logits).any():
            raise RequestError(
                "logits",
                found=f"NaN at token {int(np.flatnonzero(np.isnan(logits))[0])}",
                expected="numbers",
                remedy="Compare the engine with `engram-trt compare` to find the stage at fault.",
            )
        if self.config.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits.astype(np.float64) / max(self.config.temperature, 1e-5)
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        if self.config.top_p < 1:
            probabilities = keep_top_p(probabilities, self.config.top_p)
        # Dividing by exponential noise and taking the largest draws from the distribution (Gumbel-max).
        noise = self._random.exponential(size=probabilities.shape)
        return int(np.argmax(probabilities / noise))


def keep_top_p(probabilities: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Zero everything outside the smallest set of most likely tokens that reaches `top_p`; at least one stays.

    Args:
        probabilities: [vocab_size], summing to one.
        top_p: in (0, 1].

    Returns:
        [vocab_size], not normalised again.
    """
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros_like(probabilities)
    chosen = order[before < top_p]
    kept[chosen] = probabilities[chosen]
    return kept
