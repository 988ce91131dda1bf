"""Level `tokens`: what reaches a reader of the text. Greedy agreement, top-k overlap, KL divergence, perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engram_trt.export.accuracy.divergence.chains import widened
from engram_trt.export.accuracy.divergence.deviation import deviation, worst_coordinates
from engram_trt.export.accuracy.divergence.findings import Finding, Outcome, Track
from engram_trt.export.accuracy.divergence.limits import Limit
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.prompts import Prompt, PromptSet
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session

TOP = 10
"""Likeliest tokens whose overlap is counted."""

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogits:
    """Logits of one prompt: float32 [tokens, vocab_size], each predicting the token behind it."""

    number: int
    ids: tuple[int, ...]
    logits: Floats


@dataclass(slots=True)
class TokenScores:
    """Sums over all positions of all prompts.

    Attributes:
        positions: compared.
        greedy_agree: where the likeliest token is the same.
        top_overlap: sum of the shares of the `TOP` likeliest tokens that both sides have.
        kl: per position, KL(reference || candidate) in nats.
        nll_reference, nll_found: sums of -log p of the true next token; `predicted` of them.
    """

    positions: int = 0
    greedy_agree: int = 0
    top_overlap: float = 0.0
    kl: list[float] = field(default_factory=list)
    nll_reference: float = 0.0
    nll_found: float = 0.0
    predicted: int = 0

    def add(self, reference: Floats, found: Floats, following: Sequence[int]) -> None:
        """Count a prompt.

        Args:
            reference, found: [tokens, vocab_size].
            following: true next tokens of the first positions.
        """
        self.positions += reference.shape[0]
        self.greedy_agree += int((reference.argmax(axis=1) == found.argmax(axis=1)).sum())
        best = [np.argsort(-logits, axis=1, kind="stable")[:, :TOP] for logits in (reference, found)]
        self.top_overlap += sum(
            len(set(left.tolist()) & set(right.tolist())) / left.size for left, right in zip(*best, strict=True)
        )
        first, second = log_softmax(reference), log_softmax(found)
        self.kl += (np.exp(first) * (first - second)).sum(axis=1).tolist()
        count = len(following)
        index = np.arange(count), np.asarray(following, dtype=np.int64)
        self.nll_reference -= float(first[index].sum())
        self.nll_found -= float(second[index].sum())
        self.predicted += count

    def summary(self) -> dict[str, float]:
        """Plain numbers of a report."""
        divisor = max(self.positions, 1)
        return {
            "positions": float(self.positions),
            "greedy_agreement": self.greedy_agree / divisor,
            f"top{TOP}_overlap": self.top_overlap / divisor,
            "kl_mean": float(np.mean(self.kl)) if self.kl else 0.0,
            "kl_max": float(np.max(self.kl)) if self.kl else 0.0,
            "perplexity_reference": float(np.exp(self.nll_reference / max(self.predicted, 1))),
            "perplexity_found": float(np.exp(self.nll_found / max(self.predicted, 1))),
        }


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """[n, vocab_size] -> log probabilities in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def chain_logits(engine: Engine, prompts: PromptSet, free: bool) -> Iterator[PromptLogits]:
    """Run all prompts through a chain, in groups of rows.

    Args:
        engine: the chain.
        prompts: the rows.
        free: tokens behind the prompts are the chain's own greedy choices.
    """
    session = Session(widened(engine))
    number = 0
    for group in prompts.groups(session.limits.max_batch):
        session.reset()
        for _ in group:
            session.add()
        fed: list[list[int]] = [[] for _ in group]
        parts: list[list[Floats]] = [[] for _ in group]
        while step := _next_tokens(group, fed, parts, session.limits.max_step_tokens, free):
            for row, logits in session.step(step, "all").items():
                fed[row] += step[row]
                parts[row].append(logits)
        for row in range(len(group)):
            yield PromptLogits(number=number, ids=tuple(fed[row]), logits=np.concatenate(parts[row]))
            number += 1


def _next_tokens(
    group: Sequence[Prompt], fed: list[list[int]], parts: list[list[Floats]], most: int, free: bool
) -> dict[int, list[int]]:
    step = {}
    for row, prompt in enumerate(group):
        done = len(fed[row])
        if done < prompt.num_prompt or (not free and done < len(prompt.ids)):
            stop = prompt.num_prompt if free else len(prompt.ids)
            step[row] = list(prompt.ids[done : min(done + most, stop)])
        elif done < len(prompt.ids):
            step[row] = [int(parts[row][-1][-1].argmax())]
    return step


def compare_tokens(
    reference: Iterator[PromptLogits],
    found: Iterator[PromptLogits],
    limit: Limit,
    outcome: Outcome,
    progress: Progress,
    total: int,
) -> None:
    """Compare the logits of two chains; `outcome` receives scores and differences.

    In free mode two sides may leave each other at a tie; what follows is another text and is not compared.

    Args:
        reference, found: the same prompts in the same order.
        limit: of logits.
        outcome: of the candidate.
        progress: told (text, done, total).
        total: number of prompts.
    """
    scores = TokenScores()
    track = outcome.tracks.setdefault("head.logits", Track(limit=limit))
    for first, second in zip(reference, found, strict=True):
        progress(f"{outcome.backend}: prompt {first.number + 1}", first.number, total)
        count = _common(first.ids, second.ids)
        left, right = first.logits[:count], second.logits[:count]
        result = deviation(left, right, limit)
        positions = np.arange(count)
        track.add(result, result.wrong, np.zeros_like(result.wrong), positions.tolist())
        if result.kind == "value":
            scores.add(left, right, first.ids[1:count])
        outcome.tokens += count
        if count < len(first.ids):
            outcome.notes.append(f"prompt {first.number + 1}: the texts part at token {count}")
        if result.wrong.any():
            places = Places(rows=np.full(count, first.number), slots=positions, positions=positions)
            outcome.findings.append(
                Finding(
                    level="tokens",
                    backend=outcome.backend,
                    stage="head",
                    tensor="logits",
                    kind=result.kind,
                    error=float(result.errors[result.wrong].max()),
                    limit=limit,
                    num_wrong=int(result.wrong.sum()),
                    num_tokens=count,
                    worst=worst_coordinates(left, right, places, result.wrong),
                )
            )
    outcome.token_scores = scores.summary()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (first, second) in enumerate(zip(left, right, strict=False)):
        if first != second:
            return index
    return min(len(left), len(right))
