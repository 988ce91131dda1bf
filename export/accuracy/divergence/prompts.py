"""What a comparison feeds: real text through the model's tokenizer, in lengths around every border.

Random ids would say nothing: the Engram hash, the router and the indexer would see what they never see in use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram_trt.configs.errors import RequestError
from engram_trt.configs.limits import Limits
from engram_trt.configs.model import ModelConfig
from engram_trt.runtime.tokenizer import Tokenizer

DEFAULT_FILE = Path(__file__).resolve().parents[2] / "data" / "compare_prompts.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a comparison.

    Args:
        ids: prompt and, behind it, the tokens that are fed one by one.
        num_prompt: how many of them are the prompt.
    """

    ids: tuple[int, ...]
    num_prompt: int

    @property
    def num_decode(self) -> int:
        return len(self.ids) - self.num_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The rows of a comparison, and where they come from."""

    prompts: tuple[Prompt, ...]
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of all ids and of where each prompt ends."""
        plain = [[prompt.num_prompt, *prompt.ids] for prompt in self.prompts]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    def groups(self, width: int) -> Iterator[tuple[Prompt, ...]]:
        """Up to `width` prompts of similar, different lengths at a time."""
        ordered = sorted(self.prompts, key=lambda prompt: prompt.num_prompt)
        for start in range(0, len(ordered), width):
            yield tuple(ordered[start : start + width])


def default_prompts(
    tokenizer: Tokenizer, config: ModelConfig, limits: Limits, count: int, num_decode: int
) -> PromptSet:
    """The text that ships with the package, cut so that prompts end just before, at and behind every border.

    Args:
        tokenizer, config: of the model.
        limits: of the artefact; no prompt is longer than fits.
        count: how many prompts.
        num_decode: tokens behind each prompt.
    """
    parts = [tokenizer.encode(text, bos=False) for text in read_prompts(DEFAULT_FILE)]
    stream = [token for part in parts for token in part]
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    longest = max(limits.max_context - num_decode, 1)
    lengths = border_lengths(config, longest)
    prompts = []
    for index in range(count):
        # Every round through the lengths begins elsewhere in the text.
        start = int(starts[(index * 7 + index // len(lengths)) % len(starts)])
        needed = lengths[index % len(lengths)] + num_decode - 1
        text = [stream[(start + offset) % len(stream)] for offset in range(needed)]
        prompts.append(Prompt(ids=(tokenizer.bos_token_id, *text), num_prompt=lengths[index % len(lengths)]))
    return PromptSet(prompts=tuple(prompts), source="the default set")


def border_lengths(config: ModelConfig, longest: int) -> list[int]:
    """Prompt lengths one less, equal to and one more than what a layer can see, and the first few."""
    borders = {2, config.window_size, 2 * config.window_size}
    for layer_id in range(config.n_layers):
        layer = config.layer(layer_id)
        if layer.compress_ratio:
            borders.add(config.index_topk * layer.compress_ratio)
        if layer.uses_candidates:
            borders.add(config.candidate_topk_blocks * config.candidate_block_size * layer.compress_ratio)
    lengths = {border + step for border in borders for step in (-1, 0, 1)}
    return sorted(length for length in lengths if 0 < length <= longest) or [longest]


def prompts_from_file(path: Path, tokenizer: Tokenizer, limits: Limits, num_decode: int, *, free: bool) -> PromptSet:
    """Prompts of a text file; a blank line ends each.

    Args:
        path: UTF-8 text.
        tokenizer: of the model.
        limits: of the artefact.
        num_decode: tokens fed one by one: the last ones of the text or, in free mode, generated ones behind it.
        free: whether tokens are generated.

    Raises:
        RequestError: no such file, not UTF-8, nothing in it, or a prompt that does not fit.
    """
    prompts = []
    for number, text in enumerate(read_prompts(path), 1):
        ids = tokenizer.encode(text)
        needed = len(ids) + (num_decode if free else 0)
        if needed > limits.max_context:
            raise RequestError(
                f"{path}, prompt {number}",
                found=f"{needed} tokens",
                expected=f"at most max_context = {limits.max_context}",
                remedy="Shorten the prompt, or export with a larger limit.",
            )
        taken = len(ids) if free else max(len(ids) - num_decode, 1)
        behind = (0,) * num_decode if free else ()  # generated tokens take their place
        prompts.append(Prompt(ids=(*ids, *behind), num_prompt=taken))
    return PromptSet(prompts=tuple(prompts), source=str(path))


def read_prompts(path: Path) -> list[str]:
    """The paragraphs of a text file; RequestError if it cannot be read or has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            str(path), found=f"no readable text ({error})", expected="UTF-8", remedy="Name a text file."
        ) from None
    parts = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    if not parts:
        raise RequestError(
            str(path), found="no text", expected="prompts with a blank line between them", remedy="Write one."
        )
    return parts


def chunks(num_prompt: int, group: int, config: ModelConfig, max_step_tokens: int) -> list[int]:
    """How the prompt steps of a group are cut: as long as possible, around the window, unevenly.

    Args:
        num_prompt: of the longest prompt in the group.
        group: number of the group; the pattern changes with it.
        config: the model.
        max_step_tokens: the artefact's limit.
    """
    window = config.window_size
    patterns: Sequence[tuple[int, ...]] = ((max_step_tokens,), (window + 1, 1, max_step_tokens), (3, 2 * window))
    pattern = patterns[group % len(patterns)]
    sizes: list[int] = []
    while sum(sizes) < num_prompt:
        size = min(pattern[min(len(sizes), len(pattern) - 1)], max_step_tokens, num_prompt - sum(sizes))
        sizes.append(size)
    return sizes
