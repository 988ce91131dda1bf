"""Memory of a message's tensors: of the host, or of the GPU whose stages put them out and read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import Buffer, View
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer

Bytes = npt.NDArray[np.uint8]


class DeviceBytes:
    """Bytes on a GPU; parts of it are taken as of an array.

    Args:
        address: of the first.
        size: how many.
        driver: of the GPU.
        stream: that copies in and out are ordered on.
        owner: keeps the memory alive.
    """

    def __init__(self, address: int, size: int, driver: CudaDriver, stream: int, owner: Any) -> None:
        self.address, self.size, self.driver, self.stream, self.owner = address, size, driver, stream, owner

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.size)
        return DeviceBytes(self.address + start, stop - start, self.driver, self.stream, self.owner)

    def settle(self) -> None:
        """Wait for the copies that were enqueued."""
        self.driver.synchronize(self.stream)


Payload = Bytes | DeviceBytes


class LentBuffer(DeviceBuffer):
    """A tensor in a message's memory.

    Args:
        dtype: of the tensor.
        memory: exactly its bytes.
    """

    def __init__(self, dtype: str, memory: DeviceBytes) -> None:
        Buffer.__init__(self, dtype, memory.size // ITEM_BYTES[dtype])
        self.driver, self.stream = memory.driver, memory.stream
        self.num_bytes, self.address, self.memory = memory.size, memory.address, memory


def copy_tensor(source: View, target: View) -> None:
    """Copy a tensor: on one GPU without the host, which does not wait; otherwise through the host."""
    one, other = source.buffer, target.buffer
    if isinstance(one, DeviceBuffer) and isinstance(other, DeviceBuffer) and one.stream == other.stream:
        num_bytes = math.prod(source.shape) * ITEM_BYTES[one.dtype]
        if num_bytes:
            other.driver.copy_from(one.driver, other.address, one.address, num_bytes, other.stream)
    else:
        target.write(source.read())


def settle(memory: Payload) -> None:
    """Wait until what was copied into or out of a message's memory is there."""
    if isinstance(memory, DeviceBytes):
        memory.settle()
