"""ONNX Runtime on a GPU, without one: real sessions on a recorded driver whose device memory is the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from cuda_recorder import RecordedDriver
from onnx import helper, parser, save
from pretended_sessions import PretendedSession, RealSession

from engram_trt.configs.errors import ArtifactError, BackendError
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners import onnxruntime_cuda
from engram_trt.runtime.stage_runners.onnxruntime_cuda import OnnxRuntimeCudaBackend


def steps(session: Session) -> list[np.ndarray[Any, Any]]:
    row = session.add()
    found = [session.prefill(row, np.arange(3, 40))]
    for token in (7, 8, 9):
        found.append(session.step({row: [token]})[row])
    session.rollback(row, 2)
    found.append(session.step({row: [11]})[row])
    return found


def test_the_chain_computes_in_device_memory_what_it_computes_on_the_host(
    tiny_artifact: Path, recorder: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact.open(tiny_artifact)
    with artifact.engine("onnxruntime_cuda") as engine:
        found = steps(Session(engine))
        allocated = len(recorder.of("cuMemAlloc"))
        assert allocated > 0
    assert len(recorder.of("cuMemFree")) == allocated
    stream = {arguments[-1] for arguments in recorder.of("cuMemcpyHtoDAsync")}
    assert {provider[1]["user_compute_stream"] for provider in PretendedSession.providers} == set(map(str, stream))
    assert {place[1:3] for place in PretendedSession.bound} == {("cuda", 0)}
    monkeypatch.setattr(onnxruntime, "InferenceSession", RealSession)
    with artifact.engine("onnxruntime") as engine:
        for ours, theirs in zip(found, steps(Session(engine)), strict=True):
            assert np.array_equal(ours, theirs)


def test_between_steps_only_ids_go_in_and_only_logits_come_out(tiny_artifact: Path, recorder: RecordedDriver) -> None:
    artifact = Artifact.open(tiny_artifact)
    with artifact.engine("onnxruntime_cuda") as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2]})
        recorder.calls.clear()
        session.step({row: [4, 5]})
        read = [arguments[2] for arguments in recorder.of("cuMemcpyDtoHAsync")]
        assert sum(read) < 3 * 4 * artifact.config.vocab_size
        assert max(arguments[2] for arguments in recorder.of("cuMemcpyHtoDAsync")) < 1 << 16
        assert not recorder.of("cuMemAlloc")


def test_a_bfloat16_operator_without_a_kernel_is_named(tmp_path: Path, recorder: RecordedDriver) -> None:
    text = '<ir_version: 10, opset_import: ["" : 24]> g (bfloat16[2, 2] x) => (bfloat16[2, 2] y) { y = MatMul (x, x) }'
    path = tmp_path / "block_00.onnx"
    model = parser.parse_model(text)
    model.graph.node[0].name = "node_linear"
    save(model, path)
    with pytest.raises(BackendError) as refused:
        load(path, recorder)
    assert "node_linear" in str(refused.value)
    assert "MatMul (version 13)" in str(refused.value)
    assert "--dtype float32" in str(refused.value)


def test_a_damaged_file_is_the_artefacts_fault(tmp_path: Path, recorder: RecordedDriver) -> None:
    path = tmp_path / "block_00.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ArtifactError, match=r"block_00\.onnx"):
        load(path, recorder)


def test_a_provider_that_does_not_start_is_no_silent_cpu(
    tmp_path: Path, recorder: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    save(helper.make_model(helper.make_graph([node], "g", values[:1], values[1:])), tmp_path / "block_00.onnx")
    monkeypatch.setattr(PretendedSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match="fell back to the CPU"):
        load(tmp_path / "block_00.onnx", recorder)


def test_the_cpu_package_is_refused(recorder: RecordedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match="onnxruntime-gpu"):
        OnnxRuntimeCudaBackend(CudaDriver(recorder), {}, lambda spec, binding: np.empty(0))


def test_a_device_that_is_no_gpu_is_refused(tiny_artifact: Path) -> None:
    with pytest.raises(BackendError, match="cpu:0"):
        onnxruntime_cuda.onnxruntime_cuda_backend(Artifact.open(tiny_artifact), "cpu:0")


def load(path: Path, recorder: RecordedDriver) -> None:
    from engram_trt.configs.tensors import StageSpec

    backend = OnnxRuntimeCudaBackend(CudaDriver(recorder), {"block_00": path}, lambda spec, binding: np.empty(0))
    backend.load(StageSpec(name="block_00", kind="window", inputs=(), outputs=()))
