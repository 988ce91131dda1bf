"""Stages under ONNX Runtime's CUDA provider: the same files, in device buffers of this package bound by address.

All sessions of a device compute on one stream, the one its buffers are copied on, so nothing is copied between
stages and states are updated in place. Nodes that the provider has no kernel for run on the CPU, if that has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import ArtifactError, BackendError
from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import NUMPY_DTYPES, Backend, ResidentArrays, Run, StageRunner, View
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend, device_ordinal
from engram_trt.runtime.stage_runners.device_buffers import device_buffer
from engram_trt.runtime.stage_runners.onnxruntime import check_session

PROVIDER = "CUDAExecutionProvider"
BACKEND = "onnxruntime_cuda"
_ONNX_BFLOAT16 = 16
_MISSING_KERNEL = re.compile(r"Could not find an implementation for (\w+)\((\d+)\) node with name '([^']*)'")


class OnnxRuntimeCudaStageRunner(StageRunner):
    """One inference session on a GPU.

    Args:
        spec: the stage.
        session: opened with the CUDA provider, its bindings checked.
        driver: of the GPU.
    """

    def __init__(self, spec: StageSpec, session: Any, driver: CudaDriver) -> None:
        self.spec, self.session, self.driver = spec, session, driver

    def bind(self, views: Mapping[str, View]) -> Run:
        binding = self.session.io_binding()
        for tensor in self.spec.inputs:
            binding.bind_input(*self._place(tensor.name, views[tensor.name]))
        for tensor in self.spec.outputs:
            place = self._place(tensor.name, views[tensor.name])
            if tensor.alias is not None and place[1:] != self._place(tensor.alias, views[tensor.alias])[1:]:
                raise ValueError(f"{self.spec.name}: {tensor.name} is not bound to the memory of {tensor.alias}")
            binding.bind_output(*place)
        run_with_iobinding = self.session.run_with_iobinding

        def run() -> None:
            with self.driver.guard():
                run_with_iobinding(binding)

        # The binding holds raw addresses: keep the buffers alive as long as it.
        run.__dict__["views"] = dict(views)
        return run

    def _place(self, name: str, view: View) -> tuple[Any, ...]:
        buffer = device_buffer(view)
        element = _ONNX_BFLOAT16 if buffer.dtype == "bfloat16" else NUMPY_DTYPES[buffer.dtype]
        return name, "cuda", self.driver.ordinal, element, view.shape, buffer.address


class OnnxRuntimeCudaBackend(DeviceBackend):
    """Opens stage files on one GPU.

    Args:
        driver: of the GPU.
        stage_files: stage name -> .onnx file.
        resident_arrays: supplies resident weights, once per tensor.

    Raises:
        BackendError: the installed ONNX Runtime has no CUDA provider.
    """

    name = BACKEND

    def __init__(self, driver: CudaDriver, stage_files: Mapping[str, Path], resident_arrays: ResidentArrays) -> None:
        import onnxruntime

        if PROVIDER not in onnxruntime.get_available_providers():
            raise BackendError(
                f"back end {BACKEND}",
                found=f"onnxruntime {onnxruntime.__version__} with {', '.join(onnxruntime.get_available_providers())}",
                expected=PROVIDER,
                remedy="pip uninstall onnxruntime, then pip install 'engram-trt[onnxruntime-gpu,cuda]'.",
            )
        super().__init__(driver, resident_arrays)
        self.stage_files = stage_files

    def load(self, spec: StageSpec) -> StageRunner:
        """See `Backend.load`.

        Raises:
            BackendError: no provider has a kernel for a node, as for some operators in bfloat16.
            ArtifactError: the file cannot be opened, or is another stage's.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        on_device = {"device_id": str(self.driver.ordinal), "user_compute_stream": str(self.stream)}
        path = self.stage_files[spec.name]
        try:
            session = onnxruntime.InferenceSession(
                str(path), options, providers=[(PROVIDER, on_device), "CPUExecutionProvider"]
            )
        except Exception as error:  # the binding raises its own unrelated classes
            raise _refusal(path, str(error)) from error
        if PROVIDER not in session.get_providers():
            raise BackendError(
                f"back end {BACKEND}",
                found="a CUDA provider that does not start; ONNX Runtime fell back to the CPU",
                expected="CUDA and cuDNN libraries of the version it was built for",
                remedy="See ONNX Runtime's table of CUDA versions, or run with --backend onnxruntime.",
            )
        check_session(spec, session, path)
        return OnnxRuntimeCudaStageRunner(spec, session, self.driver)


def _refusal(path: Path, message: str) -> BackendError | ArtifactError:
    missing = _MISSING_KERNEL.search(message)
    if missing is None:
        return ArtifactError(
            str(path),
            found=f"a stage that ONNX Runtime cannot open: {message}",
            expected="a stage of this artefact",
            remedy="Export the checkpoint again.",
        )
    op, version, node = missing.groups()
    return BackendError(
        f"{path}: {node or 'a node'}",
        found=f"{op} (version {version}), for whose dtype ONNX Runtime has no kernel, neither for CUDA nor the CPU",
        expected="operators that it has",
        remedy="Export with --dtype float32, or run this artefact with --backend tensorrt.",
    )


def onnxruntime_cuda_backend(artifact: Artifact, device: str | None = None) -> Backend:
    """The entry point of back end `onnxruntime_cuda`; the first GPU unless the deployment names one."""
    files = {record.spec.name: (artifact.root / record.onnx.path).resolve() for record in artifact.manifest.stages}
    return OnnxRuntimeCudaBackend(CudaDriver.open(device_ordinal(BACKEND, device)), files, artifact.resident)
