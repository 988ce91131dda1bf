"""Exported files in other people's hands: onnx's checker, ONNX Runtime alone, Polygraphy, a zero row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from engram_trt.export.accuracy.polygraphy_loader import PROMPT_FILE
from engram_trt.export.accuracy.stage_inputs import Feed, capture_inputs
from engram_trt.export.torch_runner import TorchStageRunner
from engram_trt.plugins.moe_experts.reference import WEIGHT_EPS
from engram_trt.plugins.onnx_exporter import OPSET
from engram_trt.plugins.registry import SPECS
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine

KINDS = ("block_00", "block_01", "block_02", "block_03", "block_04", "block_06", "block_07", "block_08")
STAGES = ("engram_hash", "embedding", *KINDS, "head")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another working directory: external data must be found beside the .onnx file."""
    monkeypatch.chdir(tmp_path)


def path_of(artifact: Artifact, stage: str) -> Path:
    return artifact.root / "stages" / f"{stage}.onnx"


@pytest.mark.usefixtures("elsewhere")
def test_every_file_passes_the_checker(artifact: Artifact) -> None:
    for spec in artifact.stages:
        path = path_of(artifact, spec.name)
        onnx.checker.check_model(str(path), full_check=True)
        onnx.shape_inference.infer_shapes_path(str(path), str(Path.cwd() / "inferred.onnx"), True, True)


def test_interfaces_are_the_specs(artifact: Artifact) -> None:
    """Names, dtypes, and one symbol per symbolic extent, shared by inputs and outputs."""
    types = {"float32": 1, "int64": 7, "int32": 6, "int8": 3, "bool": 9}
    for spec in artifact.stages:
        model = onnx.load(path_of(artifact, spec.name), load_external_data=False)
        assert {item.domain: item.version for item in model.opset_import}[""] == OPSET
        for tensors, values in ((spec.inputs, model.graph.input), (spec.outputs, model.graph.output)):
            for tensor, value in zip(tensors, values, strict=True):
                shape = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
                assert (value.name, value.type.tensor_type.elem_type) == (tensor.name, types[tensor.dtype])
                assert shape == list(tensor.shape), f"{spec.name}: {tensor.name}"


def test_ops_are_plugins_with_bodies(artifact: Artifact, split_artifact: Path) -> None:
    seen = set()
    whole = [path_of(artifact, spec.name) for spec in artifact.stages]
    for path in (*whole, *sorted(split_artifact.glob("stages/block_*.onnx"))):
        model = onnx.load(path, load_external_data=False)
        bodies = {(function.name, function.overload) for function in model.functions}
        for node in model.graph.node:
            if node.domain != "engram":
                continue
            attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            assert attributes["plugin_namespace"] == b"engram"
            assert attributes["plugin_version"] == b"1"
            assert (node.op_type, node.overload) in bodies
            seen.add(node.op_type)
    assert seen == {spec.name for spec in SPECS} - {"QuantizeDequantize"}, "rounding is off in this artefact"


def test_epsilons_are_in_the_graphs(artifact: Artifact) -> None:
    """The exporter takes 1e-20 for zero where it can; a zero row would turn into NaN."""
    for stage in KINDS:
        model = onnx.load(path_of(artifact, stage), load_external_data=False)
        nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
        norms = [node for node in nodes if node.op_type == "RMSNormalization"]
        assert len(norms) >= 5
        for node in norms:
            epsilon = {item.name: item.f for item in node.attribute}["epsilon"]
            assert epsilon == np.float32(artifact.config.norm_eps)
        moe = next(function for function in model.functions if function.name == "MoEExperts")
        constants = [
            onnx.numpy_helper.to_array(item.t)
            for node in moe.node
            if node.op_type == "Constant"
            for item in node.attribute
            if item.type == onnx.AttributeProto.TENSOR
        ]
        assert any(value.ndim == 0 and value == np.float32(WEIGHT_EPS) for value in constants)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("stage", STAGES)
def test_real_inputs_and_a_zero_row_in_onnxruntime_alone(
    artifact: Artifact, exported: Engine, eager: Engine, stage: str
) -> None:
    """Each stage on what the chain gives it, and the same with one token's streams set to zero."""
    import onnxruntime

    prompt = artifact.tokenizer().encode(PROMPT_FILE.read_text(encoding="utf-8"))[:150]
    session = onnxruntime.InferenceSession(str(path_of(artifact, stage)), providers=["CPUExecutionProvider"])
    feeds = list(capture_inputs(exported, prompt, stage, num_decode_steps=1))
    assert len(feeds) == 3
    if "hidden_states" in feeds[0]:
        zeroed = {name: array.copy() for name, array in feeds[0].items()}
        zeroed["hidden_states"][:, 1] = 0
        feeds.append(zeroed)
    for feed in feeds:
        ours = session.run(None, feed)
        theirs = run_eager(eager, stage, feed)
        for name, first, second in zip([o.name for o in session.get_outputs()], ours, theirs, strict=True):
            if first.dtype == np.float32:
                live = np.isfinite(second)  # cache slots never written are whatever they were
                np.testing.assert_allclose(first[live], second[live], atol=2e-4, rtol=1e-4, err_msg=f"{stage} {name}")
                if not name.endswith(("_kv_out", "_keys_out", "_state_out")):
                    assert live.all(), f"{stage} {name}"
            else:
                np.testing.assert_array_equal(first, second, err_msg=f"{stage} {name}")


@torch.no_grad()
def run_eager(engine: Engine, stage: str, feed: Feed) -> list[np.ndarray]:
    """The stage's module on copies of the arrays."""
    runner = next(runner for runner in engine.runners if runner.spec.name == stage)
    assert isinstance(runner, TorchStageRunner)
    inputs = {name: torch.from_numpy(array.copy()) for name, array in feed.items()}
    return [result.numpy() for result in runner.module(inputs, runner.spec.output_names)]


def test_polygraphy_runs_a_stage_with_the_shipped_loader(artifact: Artifact, tmp_path: Path) -> None:
    from engram_trt.export.accuracy import polygraphy_loader

    polygraphy = Path(sys.executable).with_name("polygraphy")
    command = [str(polygraphy), "run", str(path_of(artifact, "block_00")), "--onnxrt"]
    command += ["--data-loader-script", str(polygraphy_loader.__file__), "--save-outputs", "outputs.json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert (tmp_path / "outputs.json").stat().st_size > 1000
    assert "PASSED" in result.stdout
