"""What every back end of a GPU has: a stream, buffers and resident weights in its memory."""

from __future__ import annotations

import numpy as np

from engram_trt.configs.errors import BackendError
from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import Backend, Buffer, ResidentArrays, View
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer


class DeviceBackend(Backend):
    """Memory of one GPU, all of it ordered on one stream and given back on closing.

    Args:
        driver: of the GPU.
        resident_arrays: supplies resident weights, once per tensor.
    """

    def __init__(self, driver: CudaDriver, resident_arrays: ResidentArrays) -> None:
        self.driver, self.resident_arrays = driver, resident_arrays
        self.stream = driver.create_stream()
        self._buffers: list[DeviceBuffer] = []
        self._resident: dict[tuple[int | None, str], View] = {}

    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        buffer = self.reserve(dtype, num_elements, "a session's buffers")
        buffer.clear()
        return buffer

    def resident(self, spec: StageSpec, binding: str) -> View:
        key = (spec.input(binding).owner, binding)
        if key not in self._resident:
            values = self.resident_arrays(spec, binding)
            buffer = self.reserve(spec.input(binding).dtype, values.size, f"{spec.name}: {binding}")
            buffer.write_bytes(values.reshape(-1).view(np.int8))
            self._resident[key] = buffer.view(values.shape)
        return self._resident[key]

    def reserve(self, dtype: str, num_elements: int, purpose: str) -> DeviceBuffer:
        """Memory that lives as long as the back end; CudaError names its purpose when there is no room."""
        buffer = DeviceBuffer(self.driver, self.stream, dtype, num_elements, purpose)
        self._buffers.append(buffer)
        return buffer

    def release(self) -> None:
        """Give back what stands between stream and memory; the stream has been waited for."""

    def close(self) -> None:
        """Wait for the GPU, then give everything back; a second call does nothing."""
        if self.stream < 0:
            return
        self.driver.synchronize(self.stream)
        self.release()
        for buffer in self._buffers:
            self.driver.free(buffer.address)
        self._buffers.clear()
        self._resident.clear()
        self.driver.destroy_stream(self.stream)
        self.stream = -1


def device_ordinal(backend: str, device: str | None) -> int:
    """Number of the GPU in `cuda:N`; the first one for None. BackendError for a device that is none."""
    kind, _, number = (device or "cuda:0").partition(":")
    if kind == "cuda":
        return int(number)
    raise BackendError(
        f"back end {backend}", found=f"the device {device}", expected="cuda:N", remedy="Name GPUs in the deployment."
    )
