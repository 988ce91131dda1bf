"""Stages under ONNX Runtime on the CPU: sessions bound to numpy memory, states updated in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engram_trt.configs.errors import ArtifactError, BackendError
from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.stage_runners.contract import (
    NUMPY_DTYPES,
    Array,
    Backend,
    Buffer,
    ResidentArrays,
    Run,
    StageRunner,
    View,
)


class HostBuffer(Buffer):
    """A flat numpy array; its memory never moves."""

    def __init__(self, dtype: str, storage: Array) -> None:
        super().__init__(dtype, storage.size)
        self.storage = storage

    def array(self, shape: tuple[int, ...]) -> Array:
        """The first elements as an array that shares the buffer's memory."""
        return self.storage[: int(np.prod(shape, dtype=np.int64))].reshape(shape)

    def write(self, values: Array, offset: int = 0) -> None:
        flat = values.reshape(-1)
        self.storage[offset : offset + flat.size] = flat

    def read(self, shape: tuple[int, ...]) -> Array:
        return self.array(shape)


def array_of(view: View) -> Array:
    """The array behind a view of this back end."""
    if not isinstance(view.buffer, HostBuffer):
        raise TypeError(f"a view of {type(view.buffer).__name__} reached the ONNX Runtime back end")
    return view.buffer.array(view.shape)


class OnnxRuntimeStageRunner(StageRunner):
    """One inference session."""

    def __init__(self, spec: StageSpec, session: Any) -> None:
        self.spec, self.session = spec, session

    def bind(self, views: Mapping[str, View]) -> Run:
        binding = self.session.io_binding()
        arrays = {name: array_of(view) for name, view in views.items()}
        for tensor in self.spec.inputs:
            _bind(binding.bind_input, tensor.name, arrays[tensor.name])
        for tensor in self.spec.outputs:
            if tensor.alias is not None and not _same_memory(arrays[tensor.name], arrays[tensor.alias]):
                raise ValueError(f"{self.spec.name}: {tensor.name} is not bound to the memory of {tensor.alias}")
            _bind(binding.bind_output, tensor.name, arrays[tensor.name])
        run_with_iobinding = self.session.run_with_iobinding

        def run() -> None:
            run_with_iobinding(binding)

        # The binding holds raw addresses: keep the arrays alive as long as it.
        run.__dict__["arrays"] = arrays
        return run


def _bind(bind: Callable[..., None], name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _same_memory(first: Array, second: Array) -> bool:
    return first.ctypes.data == second.ctypes.data and first.shape == second.shape


class OnnxRuntimeBackend(Backend):
    """Opens stage files and binds resident weights.

    Args:
        stage_files: stage name -> .onnx file.
        resident_arrays: supplies resident weights, once per tensor.
        num_threads: threads of each session; 0 for one per core.
        log_severity_level: of ONNX Runtime; 2 shows warnings, such as a state that was copied and not updated.
    """

    name = "onnxruntime"

    def __init__(
        self,
        stage_files: Mapping[str, Path],
        resident_arrays: ResidentArrays,
        num_threads: int = 0,
        log_severity_level: int = 3,
    ) -> None:
        self.stage_files, self.resident_arrays = stage_files, resident_arrays
        self.num_threads, self.log_severity_level = num_threads, log_severity_level
        self._resident: dict[tuple[int | None, str], View] = {}

    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        if dtype not in NUMPY_DTYPES:
            raise BackendError(
                "onnxruntime on the CPU",
                found=f"a stage with {dtype} tensors",
                expected="float32: ONNX Runtime has no bfloat16 kernels for the CPU",
                remedy="Export with --dtype float32, or run this artefact on a GPU.",
            )
        return HostBuffer(dtype, np.zeros(num_elements, dtype=NUMPY_DTYPES[dtype]))

    def load(self, spec: StageSpec) -> StageRunner:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.num_threads
        options.log_severity_level = self.log_severity_level
        # A spinning pool per session would leave no core for the stage that runs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = self.stage_files[spec.name]
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the binding raises its own unrelated classes
            raise ArtifactError(
                str(path),
                found=f"a stage that ONNX Runtime cannot open: {error}",
                expected="a stage of this artefact",
                remedy="Export the checkpoint again.",
            ) from error
        check_session(spec, session, path)
        return OnnxRuntimeStageRunner(spec, session)

    def resident(self, spec: StageSpec, binding: str) -> View:
        key = (spec.input(binding).owner, binding)
        if key not in self._resident:
            values = self.resident_arrays(spec, binding)
            self._resident[key] = HostBuffer(spec.input(binding).dtype, values.reshape(-1)).view(values.shape)
        return self._resident[key]


def check_session(spec: StageSpec, session: Any, path: Path) -> None:
    """Hold a session's bindings against the spec; raises ArtifactError."""
    found = [item.name for item in session.get_inputs()], [item.name for item in session.get_outputs()]
    expected = list(spec.input_names), list(spec.output_names)
    if found != expected:
        raise ArtifactError(
            str(path),
            found=f"bindings {found[0]} -> {found[1]}",
            expected=f"{expected[0]} -> {expected[1]}",
            remedy="Manifest and stage files do not belong together: export again.",
        )
