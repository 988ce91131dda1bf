"""Run steps of a session and join what they computed into the shape of the golden files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram_trt.export.accuracy.golden_model import GoldenModel
from engram_trt.export.accuracy.golden_sets import mask_of_blocks
from engram_trt.export.accuracy.golden_taps import TappedBackend
from engram_trt.runtime.session import Session

Values = dict[str, Tensor]
_FILLERS = {"topk": -1.0, "index_scores": float("-inf"), "block_scores": float("-inf"), "candidates": 0.0}
"""What stands in the columns a ragged tensor lacks."""


def tapped(session: Session) -> TappedBackend:
    """The session's back end."""
    backend = session.engine.backend
    if not isinstance(backend, TappedBackend):
        raise TypeError("a session without taps")
    return backend


def run_step(session: Session, model: GoldenModel, start: int, tokens: int) -> Values:
    """One step of the same tokens in every row, all logits; what it computed under the golden names.

    Args:
        session: every row has `start` tokens.
        model: gives the tokens.
        start, tokens: positions of the step.
    """
    backend = tapped(session)
    backend.start()
    inputs = {row: model.row_input(row, start, start + tokens) for row in range(model.batch)}
    session.step(inputs, "all")
    values = backend.values()
    if session.taps:
        rows = [torch.from_numpy(np.asarray(session.taps[row])) for row in range(model.batch)]
        values["main_hidden"] = torch.stack(rows)
    return _as_golden(values, model, start, tokens)


def _as_golden(values: Values, model: GoldenModel, start: int, tokens: int) -> Values:
    """Complete latents only, candidate blocks as masks over entries, embeddings where only streams are known."""
    results = dict(values)
    config, end = model.config, start + tokens
    for name, value in values.items():
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match is None:
            continue
        ratio = config.layer(int(match[1])).compress_ratio
        if match[2] == "latent":
            results[name] = value[:, : end // ratio - start // ratio]
        if match[2] == "candidate_blocks":
            width = max(end // ratio, 1)
            mask = mask_of_blocks(value, config.candidate_block_size, width)
            results[f"layers.{match[1]}.candidates"] = mask & visible(start, tokens, ratio, width)
    if "embed" not in results and model.image_mask is None:
        results["embed"] = values["embed_merged_streams"][:, :, 0]
    return results


def visible(start: int, tokens: int, ratio: int, width: int) -> Tensor:
    """Entries each token sees: [tokens, width] bool."""
    counts = (torch.arange(start, start + tokens) + 1) // ratio
    return torch.arange(width) < counts.unsqueeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive steps and the positions they covered.

    Args:
        values: what each step computed.
        starts: first position of each step.
        stop: position after the last one.
    """

    values: tuple[Values, ...]
    starts: tuple[int, ...]
    stop: int

    @property
    def start(self) -> int:
        return self.starts[0]

    def joined(self) -> Values:
        """Tensors of all steps along axis 1, ragged widths filled; names that every step has, and latents."""
        names = set.intersection(*(set(values) for values in self.values))
        return {name: join([values[name] for values in self.values], name) for name in sorted(names)}


def join(parts: Sequence[Tensor], name: str) -> Tensor:
    """Tensors along axis 1; a last axis of differing widths is filled as the golden files fill it."""
    filler = _FILLERS.get(name.rpartition(".")[2])
    if filler is not None:
        width = max(part.shape[-1] for part in parts)
        parts = [F.pad(part, (0, width - part.shape[-1]), value=filler) for part in parts]
    return torch.cat(list(parts), dim=1)


def run_span(session: Session, model: GoldenModel, start: int, chunks: Sequence[int]) -> Span:
    """Steps of the given sizes, one after another."""
    values, starts, position = [], [], start
    for size in chunks:
        values.append(run_step(session, model, position, size))
        starts.append(position)
        position += size
    return Span(values=tuple(values), starts=tuple(starts), stop=position)


def start_rows(session: Session, model: GoldenModel) -> None:
    """All rows of the model, empty."""
    session.reset()
    tapped(session).feeds = {}
    for _ in range(model.batch):
        session.add()


def chunkings(length: int, window: int) -> list[tuple[int, ...]]:
    """Ways to cut `length` tokens into steps: ones, pairs off their grid, window borders, uneven ones, all at once."""
    patterns = [(1,), (3,), (window + 1,), (max(window - 1, 1), 2, 1, 5), (1, length)]
    cuts: dict[tuple[int, ...], None] = {(length,): None}
    for pattern in patterns:
        sizes: list[int] = []
        while sum(sizes) < length:
            sizes.append(min(pattern[len(sizes) % len(pattern)], length - sum(sizes)))
        cuts[tuple(sizes)] = None
    return list(cuts)
