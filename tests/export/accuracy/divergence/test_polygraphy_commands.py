"""Stock Polygraphy on exported files: the commands of the README."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import onnx
import pytest

from engram_trt.export.accuracy import polygraphy_loader
from engram_trt.runtime.artifact import Artifact

LOADER = ["--data-loader-script", str(polygraphy_loader.__file__)]
STAGES = ["engram_hash", "embedding", *(f"block_{layer:02d}" for layer in range(12)), "head"]


def polygraphy(folder: Path, *arguments: str) -> str:
    """Run a command to its end; its output, where it succeeded."""
    command = [str(Path(sys.executable).with_name("polygraphy")), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def stage(artifact: Artifact, name: str) -> str:
    return str(artifact.root / "stages" / f"{name}.onnx")


def test_the_entry_point_is_installed() -> None:
    (entry,) = [item for item in entry_points(group="polygraphy.run.plugins") if item.name == "engram"]
    assert [type(group).__name__ for group in entry.load()()] == ["EngramArgs"]


def test_run_with_our_flag_feeds_real_inputs(artifact: Artifact, tmp_path: Path) -> None:
    output = polygraphy(
        tmp_path, "run", stage(artifact, "block_02"), "--onnxrt", "--engram", "--save-inputs", "in.json"
    )
    assert "PASSED" in output
    from polygraphy.json import load_json

    feeds = load_json(str(tmp_path / "in.json"))
    assert len(feeds) == 4
    assert feeds[0]["start_positions"].tolist() == [0]
    assert feeds[3]["start_positions"].tolist() == [feeds[2]["start_positions"][0] + 1]


@pytest.mark.large
def test_run_without_the_flag_is_polygraphys_own(artifact: Artifact, tmp_path: Path) -> None:
    assert "PASSED" in polygraphy(tmp_path, "run", stage(artifact, "embedding"), "--onnxrt")


def check_and_cut(artifact: Artifact, name: str, folder: Path) -> None:
    file = stage(artifact, name)
    assert "Graph Input(s)" in polygraphy(folder, "inspect", "model", file)
    polygraphy(folder, "check", "lint", file, *LOADER)
    output = onnx.load(file, load_external_data=False).graph.output[-1].name
    polygraphy(folder, "surgeon", "extract", file, "--outputs", f"{output}:auto", "-o", "part.onnx")
    assert [item.name for item in onnx.load(folder / "part.onnx").graph.output] == [output]


def test_inspect_lint_and_extract(artifact: Artifact, tmp_path: Path) -> None:
    check_and_cut(artifact, "block_00", tmp_path)


@pytest.mark.large
@pytest.mark.parametrize("name", STAGES)
def test_every_file_takes_every_command(name: str, artifact: Artifact, tmp_path: Path) -> None:
    check_and_cut(artifact, name, tmp_path)
    assert "PASSED" in polygraphy(tmp_path, "run", stage(artifact, name), "--onnxrt", *LOADER)


@pytest.mark.large
def test_reduce_finds_a_node(artifact: Artifact, tmp_path: Path) -> None:
    """A check that fails while the graph rotates by sin: what is left is that node."""
    check = "import onnx, sys\nnodes = onnx.load('polygraphy_debug.onnx').graph.node\n"
    check += "sys.exit(any(node.op_type == 'Sin' for node in nodes))\n"
    (tmp_path / "check.py").write_text(check)
    command = ["debug", "reduce", stage(artifact, "embedding"), "-o", "reduced.onnx", "--mode", "bisect"]
    polygraphy(tmp_path, *command, "--check", sys.executable, "check.py")
    kept = [node.op_type for node in onnx.load(tmp_path / "reduced.onnx").graph.node]
    assert "Sin" in kept
    assert len(kept) < 10
