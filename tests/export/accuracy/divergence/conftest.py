"""Prompts short enough for many comparisons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engram_trt.export.accuracy.divergence.comparison import CompareRequest, Comparison
from engram_trt.export.accuracy.divergence.prompts import Prompt, PromptSet
from engram_trt.runtime.artifact import Artifact

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def comparison(artifact: Artifact) -> Callable[..., Comparison]:
    """A comparison of rows with prompts of the given lengths."""
    ids = artifact.tokenizer().encode("The ferry left the island at seven, as it had every morning. " * 12)

    def make(*lengths: int, num_decode: int = 2, **choices: object) -> Comparison:
        made = Comparison(CompareRequest(artifact=artifact, **choices), lambda text, done, total: None)  # type: ignore[arg-type]
        rows = [
            Prompt(ids=(ids[0], *ids[1 + 9 * row : 9 * row + length + num_decode]), num_prompt=length)
            for row, length in enumerate(lengths)
        ]
        made.prompts = PromptSet(prompts=tuple(rows), source="a test")
        return made

    return make
