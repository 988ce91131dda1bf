"""Prompt in, tokens out, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.sampling import Sampler, SamplingConfig
from engram_trt.runtime.session import Session

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
        limit = session.limits.max_context
        if not prompt or config.max_tokens < 1 or len(prompt) + config.max_tokens > limit:
            raise RequestError(
                "prompt",
                found=f"{len(prompt)} tokens and {config.max_tokens} new ones",
                expected=f"at least 1 of each, together at most max_context = {limit}",
                remedy="Change the prompt or --max-tokens, or export with a larger limit.",
            )
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
