"""The golden vectors through both back ends: those in the repository, and the whole set where it lies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engram_trt.export.accuracy.golden_compare import compare_folder, run_job
from engram_trt.export.accuracy.golden_folder import GoldenFolder, Job, modes_of
from engram_trt.export.accuracy.golden_ops import COMPARISONS
from engram_trt.export.accuracy.golden_results import Results

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
WHOLE = Path(__file__).parents[4] / "shared" / "golden"
MODELS = [
    (path.name, mode)
    for path in sorted((GOLDEN / "model").iterdir())
    for mode in modes_of(GoldenFolder.open(GOLDEN), path.name)
]


def agree(results: Results) -> None:
    wrong = [f"{check.file}: {check.tensor}: {check.found}" for check in results.checks if not check.found.ok]
    assert results.checks
    assert not wrong


def run(kind: str, name: str, backend: str, mode: str = "") -> Results:
    torch.set_num_threads(1)
    return run_job(GOLDEN, Job(kind=kind, name=name, mode=mode, backend=backend), lambda text: None)


@pytest.mark.parametrize("backend", ["host", "torch", "onnxruntime"])
def test_hash(backend: str) -> None:
    agree(run("hash", "rows", backend))


@pytest.mark.parametrize("name", COMPARISONS)
def test_op_through_torch(name: str) -> None:
    agree(run("op", name, "torch"))


@pytest.mark.parametrize("name", COMPARISONS)
def test_op_through_onnxruntime(name: str) -> None:
    agree(run("op", name, "onnxruntime"))


@pytest.mark.parametrize(("name", "mode"), MODELS)
def test_model_through_torch(name: str, mode: str) -> None:
    agree(run("model", name, "torch", mode))


def test_model_through_onnxruntime() -> None:
    """Zero rows, pairs, candidates and Engram; the other models are `large`."""
    agree(run("model", "zero4", "onnxruntime", "f32"))


@pytest.mark.large
@pytest.mark.parametrize(("name", "mode"), [pair for pair in MODELS if pair != ("zero4", "f32")])
def test_other_models_through_onnxruntime(name: str, mode: str) -> None:
    agree(run("model", name, "onnxruntime", mode))


@pytest.mark.large
def test_the_whole_set_beside_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    if not WHOLE.is_dir():
        with capsys.disabled():
            print(f"\n{WHOLE} is absent: only the vectors under tests/data were compared")
        pytest.skip("../shared/golden is absent")
    report = compare_folder(WHOLE, ["torch", "onnxruntime"])
    agree(report.results)
    assert report.exit_code == 0
