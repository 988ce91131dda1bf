"""An artefact that rounds activations and caches: flips are no difference, faults are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import planted
from seeded_faults import ROUNDING_FAULTS, SeededFault

from engram_trt.export.accuracy.divergence.comparison import CompareRequest, Comparison
from engram_trt.export.accuracy.divergence.deviation import Deviation
from engram_trt.export.accuracy.divergence.outputs import without_flips
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine


def out(wrong: int, total: int, kind: str = "value") -> Deviation:
    mask = np.arange(total) < wrong
    return Deviation(kind=kind, errors=mask.astype(np.float64), wrong=mask)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "total", "left"), [(3, 3, 0), (4, 4, 4), (4, 16, 0), (5, 16, 5), (0, 9, 0)])
def test_few_tokens_are_flips(wrong: int, total: int, left: int) -> None:
    assert without_flips(out(wrong, total)).wrong.sum() == left


@pytest.mark.parametrize("kind", ["not finite", "shape"])
def test_no_number_and_another_shape_are_never_flips(kind: str) -> None:
    assert without_flips(out(1, 100, kind)).wrong.sum() == 1


@pytest.fixture(scope="module")
def rounding(tiny_checkpoint: Path) -> Artifact:
    from engram_trt.configs.preset_files import deployment_preset
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint

    folder = tiny_checkpoint.with_name("rounding")
    choices = {"activation_quantization": "reference", "cache_quantization": "reference"}
    deployment = replace(deployment_preset("tiny"), **choices)  # type: ignore[arg-type]
    export_checkpoint(ExportRequest(checkpoint=tiny_checkpoint, out=folder, deployment=deployment))
    return Artifact.open(folder)


@pytest.fixture(scope="module")
def sides(rounding: Artifact) -> Iterator[tuple[Engine, Engine]]:
    with rounding.engine("torch") as eager, rounding.engine("onnxruntime") as exported:
        yield eager, exported


def compare(artifact: Artifact, **choices: object) -> Comparison:
    request = CompareRequest(artifact=artifact, num_prompts=16, num_decode=4, **choices)  # type: ignore[arg-type]
    return Comparison(request, lambda text, done, total: None)


@pytest.mark.large
def test_nothing_is_reported_where_nothing_is_wrong(rounding: Artifact, sides: tuple[Engine, Engine]) -> None:
    outcome = compare(rounding).compare("onnxruntime", *sides, sides[0])
    assert outcome.findings == []
    assert any("rounds" in note for note in outcome.notes)


@pytest.mark.large
@pytest.mark.parametrize("fault", ROUNDING_FAULTS, ids=[fault.label for fault in ROUNDING_FAULTS])
def test_a_fault_of_rounding_is_named(fault: SeededFault, rounding: Artifact, sides: tuple[Engine, Engine]) -> None:
    with planted(fault.name, fault.replacement()):
        outcome = compare(rounding, bisect=True).compare("onnxruntime", *sides, sides[0])
    first = outcome.findings[0]
    assert (first.stage, first.tensor) == (fault.stage, fault.tensor)
    assert first.point is not None
    assert fault.op in first.point.op
