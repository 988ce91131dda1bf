"""Fixtures shared by all tests: one synthetic checkpoint and one export of it per run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

SHARED_GOLDEN = ROOT.parent / "shared" / "golden"


def pytest_report_header() -> str:
    """Say whether the full set of golden vectors lies beside the repository."""
    state = "found, compared in the large tests" if SHARED_GOLDEN.is_dir() else "absent: only tests/data is compared"
    return f"full golden vectors (../shared/golden): {state}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what a normal run leaves out."""
    left_out = len(terminalreporter.stats.get("deselected", []))
    if left_out:
        terminalreporter.write_line(f"{left_out} tests left out by markers; the large ones run with `make test-large`")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint of preset tiny; read only."""
    from engram_trt.configs.preset_files import model_preset
    from engram_trt.export.synth import SynthRequest, synthesize

    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    synthesize(SynthRequest(config=model_preset("tiny"), out=out, seed=0))
    return out


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path) -> Path:
    """Its export in float32 with taps; read only."""
    from dataclasses import replace

    from engram_trt.configs.preset_files import deployment_preset
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint

    out = tiny_checkpoint.with_name("artefact")
    deployment = replace(deployment_preset("tiny"), dspark_taps=True)
    export_checkpoint(ExportRequest(checkpoint=tiny_checkpoint, out=out, deployment=deployment))
    return out


@pytest.fixture(scope="session")
def split_artifact(tiny_checkpoint: Path) -> Path:
    """The same checkpoint exported with experts as stages of their own, so that devices can share them; read only."""
    from dataclasses import replace

    from engram_trt.configs.preset_files import deployment_preset
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint

    out = tiny_checkpoint.with_name("split")
    deployment = replace(deployment_preset("tiny"), dspark_taps=True, experts=("cpu",))
    export_checkpoint(ExportRequest(checkpoint=tiny_checkpoint, out=out, deployment=deployment))
    return out


@pytest.fixture(scope="session")
def artifact(tiny_artifact: Path) -> Artifact:
    """The same, opened."""
    from engram_trt.runtime.artifact import Artifact

    return Artifact.open(tiny_artifact)


@pytest.fixture(scope="session")
def eager(artifact: Artifact) -> Iterator[Engine]:
    """Its chain in the eager modules; an engine is never changed, so one serves all sessions."""
    with artifact.engine("torch") as engine:
        yield engine


@pytest.fixture(scope="session")
def exported(artifact: Artifact) -> Iterator[Engine]:
    """Its chain under ONNX Runtime."""
    with artifact.engine("onnxruntime") as engine:
        yield engine
