"""Device memory of tensors: allocated once, written from and read to the host on one stream."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import NUMPY_DTYPES, Array, Buffer, View

CHUNK_BYTES = 1 << 28
"""Weights are copied in pieces of this size, so that a mapped file is not read into memory as a whole."""


class DeviceBuffer(Buffer):
    """A flat piece of device memory that never moves.

    Args:
        driver: of its device.
        stream: that copies are ordered on.
        dtype, num_elements: of the tensor.
        purpose: for the message when there is no room.
    """

    def __init__(self, driver: CudaDriver, stream: int, dtype: str, num_elements: int, purpose: str) -> None:
        super().__init__(dtype, num_elements)
        self.driver, self.stream = driver, stream
        self.num_bytes = num_elements * ITEM_BYTES[dtype]
        self.address = driver.allocate(self.num_bytes, purpose)

    def clear(self) -> None:
        """Enqueue filling with zeros."""
        if self.num_bytes:
            self.driver.clear(self.address, self.num_bytes, self.stream)

    def write(self, values: Array, offset: int = 0) -> None:
        stored = np.ascontiguousarray(to_stored(self.dtype, values).reshape(-1))
        if offset + stored.size > self.num_elements:
            raise ValueError(f"{stored.size} values at {offset} of a buffer of {self.num_elements}")
        if stored.size:
            place = self.address + offset * ITEM_BYTES[self.dtype]
            self.driver.copy_to_device(place, stored.ctypes.data, stored.nbytes, self.stream)

    def write_bytes(self, content: npt.NDArray[np.int8]) -> None:
        """Copy raw bytes, in pieces."""
        for start in range(0, content.size, CHUNK_BYTES):
            piece = np.ascontiguousarray(content[start : start + CHUNK_BYTES])
            self.driver.copy_to_device(self.address + start, piece.ctypes.data, piece.nbytes, self.stream)

    def read(self, shape: tuple[int, ...]) -> Array:
        stored = np.empty(math.prod(shape), dtype=stored_dtype(self.dtype))
        if stored.size:
            self.driver.copy_to_host(stored.ctypes.data, self.address, stored.nbytes, self.stream)
        return from_stored(self.dtype, stored).reshape(shape)


def device_buffer(view: View) -> DeviceBuffer:
    """The buffer behind a view of this back end."""
    if not isinstance(view.buffer, DeviceBuffer):
        raise TypeError(f"a view of {type(view.buffer).__name__} reached a back end of the GPU")
    return view.buffer


def stored_dtype(dtype: str) -> type[np.generic]:
    """How a dtype's elements lie in host memory; numpy has no bfloat16."""
    return np.uint16 if dtype == "bfloat16" else NUMPY_DTYPES[dtype]


def to_stored(dtype: str, values: Array) -> Array:
    """Values in the form they are copied in; float32 is rounded to bfloat16, ties to even."""
    if dtype != "bfloat16":
        return values.astype(NUMPY_DTYPES[dtype], copy=False)
    bits = values.astype(np.float32, copy=False).view(np.uint32) if values.ndim else np.float32(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding may carry a NaN into infinity, or past it.
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    result: Array = np.where(is_nan, quiet, rounded).astype(np.uint16)
    return result


def from_stored(dtype: str, stored: Array) -> Array:
    """The inverse of `to_stored`; bfloat16 comes back as float32."""
    if dtype != "bfloat16":
        return stored
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
