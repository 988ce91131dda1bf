"""Hold what steps computed against a file of golden intermediates, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_results import Vectors, bits
from engram_trt.export.accuracy.golden_sets import as_sets, sorted_by_index
from engram_trt.export.accuracy.golden_steps import Values, visible
from engram_trt.export.accuracy.golden_tolerance import (
    BLOCKS,
    EXACT,
    LOGITS,
    MIXES,
    STREAMS,
    VOID_MARGINS,
    Limit,
)

INSIDE_A_STAGE = "inside a stage, where only the torch modules can be watched"
_MARGINS = ("index_margin", "block_margin", "gate_margin")
_CHOICES = ("topk", "candidates", "gate_idx")
_COPIED = ("hash_ids", "embed", "embed_merged_streams")


def is_mix(name: str) -> bool:
    """Whether a tensor is a reading, writing or combining weight of the streams."""
    return name.startswith("hc_") or name == "pre_mix"


def void_positions(vectors: Vectors, config: ModelConfig, mode: str) -> list[Tensor | None]:
    """Per layer, positions whose choices rounding may turn over here or in an earlier layer.

    Returns:
        one [batch, tokens] bool per layer; None while no layer so far makes a choice.
    """
    void: Tensor | None = None
    result: list[Tensor | None] = []
    for layer in range(config.n_layers):
        for name in (f"layers.{layer}.{margin}" for margin in _MARGINS):
            if name in vectors and VOID_MARGINS[mode] > 0:
                close = vectors.input(name).to(torch.float32) < VOID_MARGINS[mode]
                void = close if void is None else void | close
        result.append(void)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanComparison:
    """Compares steps with one file.

    Args:
        vectors: the file.
        config: the model.
        mode: numeric mode of the file.
        start: first position the file covers.
        tokens: positions it covers.
        label: put in front of the table's groups, e.g. `chunked `.
    """

    vectors: Vectors
    config: ModelConfig
    mode: str
    start: int
    tokens: int
    label: str = ""

    def compare(self, got: Values, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Compare every tensor of the file that the steps have.

        Args:
            got: joined steps over exactly the file's positions.
            wanted: which names to compare.
        """
        void = void_positions(self.vectors, self.config, self.mode)
        for name in self.vectors.names:
            if name not in got or not wanted(name):
                continue
            match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
            layer = int(match[1]) if match else None
            self._compare(name, layer, got, None if layer is None else void[layer])

    def _compare(self, name: str, layer: int | None, got: Values, void: Tensor | None) -> None:
        vectors, suffix = self.vectors, name.rpartition(".")[2]
        value, want = self._aligned(name, suffix, got[name])
        what, limit = self._group(suffix)
        if suffix in ("gate_idx", "gate_w"):
            self._compare_gate(name, suffix, got, void)
            return
        if suffix == "topk":
            entries = int(max(want.max(), value.max())) + 1 if want.numel() else 1
            value, want = as_sets(value, entries), as_sets(want, entries)
        if suffix == "candidates" and layer is not None:
            ratio = self.config.layer(layer).compress_ratio
            seen = visible(self.start, self.tokens, ratio, want.shape[-1])
            value, want = bits(value) & seen, bits(want) & seen
        if void is not None and suffix != "latent":
            value, want = value[~void], want[~void]
        vectors.check(name, value, limit, what, want=want)

    def _group(self, suffix: str) -> tuple[str, Limit]:
        """Line of the table, and what is accepted there."""
        if suffix in _COPIED or suffix in _CHOICES:
            what, limit = ("ids and embeddings" if suffix in _COPIED else "choices"), EXACT
        elif self.mode in BLOCKS:
            what, limit = ("logits" if suffix == "logits" else "block by block"), BLOCKS[self.mode]
        elif suffix == "logits":
            what, limit = "logits", LOGITS
        else:
            what, limit = ("mixes", MIXES) if is_mix(suffix) else ("streams", STREAMS)
        return f"{self.label}{what}", limit

    def _aligned(self, name: str, suffix: str, value: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides at one width, at the steps that the file has."""
        want = self.vectors.input(name)
        steps = f"{name}__steps"
        if steps in self.vectors:
            chosen = self.vectors.input(steps).to(torch.int64)
            if suffix != "latent":  # of latents there is one per complete group on both sides
                value = value[:, chosen]
        if suffix in ("index_scores", "block_scores"):
            value, want = _same_width(value, want, float("-inf"))
        if suffix == "candidates":
            value, want = _same_width(value.to(torch.uint8), want, 0)
        return value, want

    def _compare_gate(self, name: str, suffix: str, got: Values, void: Tensor | None) -> None:
        """A choice of experts is a set, and each expert of it has a weight."""
        base = name.removesuffix(suffix)
        kept = slice(None) if void is None else ~void
        want = self.vectors.input(f"{base}gate_idx").to(torch.int64) if f"{base}gate_idx" in self.vectors else None
        if want is None:
            return
        what, limit = self._group(suffix)
        value = got[f"{base}gate_idx"].to(torch.int64)
        if suffix == "gate_idx":
            ordered, wanted = torch.sort(value, dim=-1).values, torch.sort(want, dim=-1).values
            self.vectors.check(name, ordered[kept], limit, what, want=wanted[kept])
            return
        _, weights = sorted_by_index(value, got[name])
        _, wanted = sorted_by_index(want, self.vectors.input(name))
        self.vectors.check(name, weights[kept], limit, what, want=wanted[kept])

    def note_rest(self, backend: str) -> None:
        """Say of the file's other tensors why they were not compared."""
        vectors = self.vectors
        for name in vectors.names:
            if name.endswith("__steps") or name.rpartition(".")[2] in _MARGINS:
                vectors.input(name)
        known = re.compile(
            r"(layers\.\d+\.(engram_out|hc_\w+|attn_\w+|ffn_\w+|gate_\w+|latent|index_scores|block_scores)"
            r"|embed|final_norm)"
        )
        if backend != "torch":
            vectors.skip([name for name in vectors.names if known.fullmatch(name)], INSIDE_A_STAGE)
        vectors.finish()


def _same_width(first: Tensor, second: Tensor, filler: float) -> tuple[Tensor, Tensor]:
    """Both with the wider one's last axis: what one side lacks must be the filler on the other."""
    width = max(first.shape[-1], second.shape[-1])
    widened = (F.pad(item, (0, width - item.shape[-1]), value=filler) for item in (first, second))
    left, right = widened
    return left, right


def cut(values: Values, config: ModelConfig, start: int, first: int, last: int) -> Values:
    """Positions first..last-1 of joined steps that began at `start`; latents by the groups complete there."""
    results: Values = {}
    for name, value in values.items():
        match = re.fullmatch(r"layers\.(\d+)\.latent", name)
        if match is None:
            results[name] = value[:, first - start : last - start]
            continue
        ratio = config.layer(int(match[1])).compress_ratio
        base = start // ratio
        results[name] = value[:, first // ratio - base : last // ratio - base]
    return results
