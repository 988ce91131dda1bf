"""Each seeded fault is named in first place, by stage and tensor, and the bisection ends at the op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults import original, planted
from seeded_faults import FAULTS, SeededFault

from engram_trt.export.accuracy.divergence.comparison import Comparison
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session

SHORT, LONG = (2, 19), (66, 97)
"""Prompts that exceed the window of 16; and the top-k of 32 pairs and the 96 entries of the candidate blocks."""


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.label for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.label for fault in FAULTS])
def test_a_fault_is_named(
    fault: SeededFault, artifact: Artifact, eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    lengths = LONG if fault.stage in ("block_06", "block_08") or fault.tensor == "topk_indices" else SHORT
    compare = comparison(*lengths, bisect=True)
    with planted(fault.name, fault.replacement()):
        reference = artifact.engine("torch") if fault.reloads else eager
        outcome = compare.compare("onnxruntime", reference, exported, reference)
    first = outcome.findings[0]
    assert first.stage == fault.stage
    assert fault.tensor in ("", first.tensor)
    assert first.worst
    if fault.op:
        assert first.point is not None
        assert fault.op in first.point.op
        assert first.cause == "own"


def test_without_a_fault_nothing_is_reported(
    eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    outcome = comparison(*SHORT, *LONG).compare("onnxruntime", eager, exported, eager)
    assert outcome.findings == []
    assert outcome.ties == {}
    assert outcome.tokens == sum(SHORT + LONG) + 4 * 2


def test_the_block_is_as_it_was_after_planting() -> None:
    fault = FAULTS[0]
    before = original(fault.name)
    with planted(fault.name, fault.replacement()):
        assert original(fault.name) is not before
    assert original(fault.name) is before


def test_a_fault_in_the_runtime_is_on_the_torch_side_only(eager: Engine, exported: Engine) -> None:
    def broken(self: object, num_rows: int) -> None:
        raise LookupError("the replacement")

    with planted("engram_trt.runtime.token_cache.TokenCache.recent", broken):
        session = Session(exported)
        session.step({session.add(): [5]})
        session = Session(eager)
        with pytest.raises(LookupError, match="the replacement"):
            session.step({session.add(): [5]})


def test_a_fault_of_one_layer_names_that_layer(
    eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    """The stages before it agree, those after it are judged on the reference's inputs and agree as well."""
    name = "engram_trt.export.modeling.block.Block.mix"
    mix = original(name)

    def wrong_in_layer_five(self: object, sublayer: str, streams: object) -> object:
        pre, post, comb = mix(self, sublayer, streams)
        return pre, post, comb * (1.01 if self.layer.layer_id == 5 else 1)  # type: ignore[attr-defined]

    with planted(name, wrong_in_layer_five):
        outcome = comparison(*SHORT).compare("onnxruntime", eager, exported, eager)
    assert {finding.stage for finding in outcome.findings} == {"block_05"}
