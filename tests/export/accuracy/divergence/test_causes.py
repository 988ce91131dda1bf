"""What is called a cause, what is excused, and what the published code's quirk looks like from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults import original, planted
from torch import Tensor

from engram_trt.export.accuracy.divergence.comparison import Comparison
from engram_trt.export.accuracy.divergence.limits import Limits
from engram_trt.runtime.engine import Engine


def test_a_difference_that_came_in_is_told_from_an_own_one(
    eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    """The embedding is off by a per cent and allowed to be: the block behind it is not at fault."""
    name = "engram_trt.export.stages.embedding.EmbeddingStage.forward"
    forward = original(name)

    def louder(self: Any, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        results = dict(zip(outputs, forward(self, inputs, outputs), strict=True))
        results["hidden_states"] = results["hidden_states"] * 1.01
        return tuple(results.values())

    compare = comparison(2, 19)
    with planted(name, louder):
        strict = compare.compare("onnxruntime", eager, exported, eager)
        compare.limits = Limits(measured={"embedding.hidden_states": 1.0})
        lenient = compare.compare("onnxruntime", eager, exported, eager)
    assert (strict.findings[0].stage, strict.findings[0].cause) == ("embedding", "own")
    assert (lenient.findings[0].stage, lenient.findings[0].cause) == ("block_00", "came in")
    assert lenient.findings[0].tensor == "hidden_states_out"


def test_another_order_of_equal_scores_is_no_difference(
    eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    """Streams of zeros make every score equal; one side then takes the newest entries, the other the oldest."""
    name = "engram_trt.plugins.indexer.reference.select"
    select = original(name)
    flipped = []

    def newest_first(scores: Tensor, k: int) -> Tensor:
        lists = select(scores, k)
        mirrored = scores.shape[-1] - 1 - select(scores.flip(-1), k)
        mirrored = torch.where(mirrored >= scores.shape[-1], -1, mirrored)
        last = torch.iinfo(torch.int32).max
        ordered, _ = torch.sort(torch.where(mirrored < 0, last, mirrored), dim=-1)
        found = torch.where(ordered == last, -1, ordered).to(torch.int32)
        flipped.append(bool((found != lists).any()))
        return found

    with planted(name, newest_first):
        outcome = comparison(66, 70, num_decode=1).compare("onnxruntime", eager, exported, eager)
    assert any(flipped), "no tie occurred: nothing was tested"
    assert outcome.findings == []


def test_stale_index_keys_show_in_decode_and_in_the_lists_of_pairs(comparison: Callable[..., Comparison]) -> None:
    outcome = comparison(96, num_decode=3, stale_keys=True).run().outcomes[0]
    first = outcome.findings[0]
    assert (first.stage, first.tensor) == ("block_02", "topk_indices")
    assert first.step == 1, "the prompt is one step; behind it the first token leaves its pair open"
    assert first.selections[0].position == 96


def test_no_stale_keys_while_every_pair_is_selected(comparison: Callable[..., Comparison]) -> None:
    assert comparison(20, num_decode=3, stale_keys=True).run().exit_code == 0
