"""Prompt in, tokens out, one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.sampling import Sampler, SamplingConfig
from engram_trt.runtime.session import Logits, Session

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """When to stop and how to choose.

    Args:
        max_tokens: new tokens at most.
        ignore_eos: do not stop at the end-of-sequence id.
        sampling: how tokens are chosen.
    """

    max_tokens: int = 128
    ignore_eos: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


class Generation:
    """Iterates over the new tokens of one prompt; afterwards `finish_reason` says why it ended.

    Args:
        session: a row of it is used and given back.
        prompt: token ids.
        config: when to stop and how to choose.

    Raises:
        RequestError: the prompt is empty or does not fit, before anything runs.
    """

    def __init__(self, session: Session, prompt: Sequence[int], config: GenerationConfig) -> None:
        _require_fits(prompt, config, session.limits.max_context)
        self.session, self.prompt, self.config = session, list(prompt), config
        self.finish_reason: FinishReason = "length"

    def __iter__(self) -> Iterator[int]:
        session, config = self.session, self.config
        sampler, eos = Sampler(config.sampling), session.engine.config.eos_token_id
        row = session.add()
        try:
            logits = session.prefill(row, self.prompt)
            for count in range(config.max_tokens):
                token = sampler.sample(logits)
                if token == eos and not config.ignore_eos:
                    self.finish_reason = "eos"
                    return
                yield token
                if count + 1 < config.max_tokens:
                    logits = session.step({row: [token]})[row]
        finally:
            session.finish(row)


def generate_together(engine: Engine, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
    """Continue several prompts, each a micro-batch of its own: while one waits for a device, others use the rest.

    Args:
        engine: on as many devices, or in as many processes, as it has; the tokens do not depend on that.
        prompts: token ids of each sequence.
        config: for every sequence; each draws from its own random numbers, seeded alike.

    Returns:
        the new tokens of each prompt, without the end-of-sequence id.

    Raises:
        RequestError: a prompt is empty or does not fit, before anything runs.
    """
    for prompt in prompts:
        _require_fits(prompt, config, engine.deployment.limits.max_context)
    lanes = [_Lane(engine, prompt, config) for prompt in prompts]
    waiting = deque(lanes)
    for lane in lanes:
        lane.begin()
    while waiting:  # the one that began first is done first
        lane = waiting.popleft()
        if lane.go_on():
            waiting.append(lane)
    return [lane.tokens for lane in lanes]


class _Lane:
    """One sequence with a session of its own and at most one step under way."""

    def __init__(self, engine: Engine, prompt: Sequence[int], config: GenerationConfig) -> None:
        self.tokens: list[int] = []
        self._session, self._config = Session(engine, max_batch=1), config
        self._sampler, self._row = Sampler(config.sampling), self._session.add()
        size = self._session.limits.max_step_tokens
        self._chunks = deque(list(prompt[start : start + size]) for start in range(0, len(prompt), size))
        self._wait: Callable[[], dict[int, Logits]]

    def begin(self) -> None:
        """Start the next step."""
        self._wait = self._session.start({self._row: self._chunks.popleft()})

    def go_on(self) -> bool:
        """Wait for the step under way and start the next; False when there is nothing left to do."""
        logits = self._wait()[self._row]
        if not self._chunks:
            token = self._sampler.sample(logits)
            if token == self._session.engine.config.eos_token_id and not self._config.ignore_eos:
                return False
            self.tokens.append(token)
            if len(self.tokens) == self._config.max_tokens:
                return False
            self._chunks.append([token])
        self.begin()
        return True


def _require_fits(prompt: Sequence[int], config: GenerationConfig, max_context: int) -> None:
    if not prompt or config.max_tokens < 1 or len(prompt) + config.max_tokens > max_context:
        raise RequestError(
            "prompt",
            found=f"{len(prompt)} tokens and {config.max_tokens} new ones",
            expected=f"at least 1 of each, together at most max_context = {max_context}",
            remedy="Change the prompt or --max-tokens, or export with a larger limit.",
        )
