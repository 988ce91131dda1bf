"""A stand-in for the module `cuda.bindings.driver`: host memory as device memory, and a record of every call.

Only calls are imitated. Kernels do not run; what a test learns is which were launched, in which order, with which
arguments, under which context and on which stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class CUresult(IntEnum):
    """Codes as the real module has them."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class _Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class _FunctionAttribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class _CaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


_RESULTS = {
    "cuCtxPopCurrent": "context",
    "cuGraphInstantiate": None,
    "cuMemGetInfo": (1 << 20, 1 << 30),
}


@dataclass
class RecordedDriver:
    """The stand-in.

    Args:
        sm: compute capability of every device.
        failures: function name -> code it answers with.
    """

    sm: int = 120
    num_devices: int = 1
    peers_reach: bool = True
    failures: dict[str, CUresult] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    current: list[Any] = field(default_factory=list)
    devices_of: list[Any] = field(default_factory=list)
    """The current device at each of `calls`; None where there was none."""
    unguarded: list[str] = field(default_factory=list)
    capturing: bool = False
    captured: dict[str, list[tuple[str, tuple[Any, ...]]]] = field(default_factory=dict)
    CUresult = CUresult
    CUdevice_attribute = _Attribute
    CUfunction_attribute = _FunctionAttribute
    CUstreamCaptureMode = _CaptureMode

    def __post_init__(self) -> None:
        self._memory: dict[int, Any] = {}
        self._count = 0
        self._streams = iter(range(7, 100))
        self._events = iter(range(1000, 100000))

    @property
    def depth(self) -> int:
        """How many contexts are pushed."""
        return len(self.current)

    def names(self, *prefixes: str) -> list[str]:
        """Names of the calls so far, of some kinds only if asked."""
        return [name for name, _ in self.calls if not prefixes or name.startswith(prefixes)]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of every call of one function."""
        return [arguments for called, arguments in self.calls if called == name]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            return self._answer(name, arguments)

        call.__name__ = name
        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in ("cuGetErrorName", "cuGetErrorString"):
            return CUresult.CUDA_SUCCESS, CUresult(arguments[0]).name.encode()
        self.calls.append((name, arguments))
        self.devices_of.append(_ordinal(self.current[-1]) if self.current else None)
        free = ("cuInit", "cuDevice", "cuCtx")
        if self.depth == 0 and not name.startswith(free):
            self.unguarded.append(name)
        if name in self.failures:
            return (self.failures[name],) if name != "cuMemAlloc" else (self.failures[name], None)
        results = getattr(self, f"_{name}", lambda *given: _default(name))(*arguments)
        return (CUresult.CUDA_SUCCESS, *results)

    def _cuDeviceGetCount(self) -> tuple[Any, ...]:  # noqa: N802
        return (self.num_devices,)

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return (ordinal,)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return (f"context {device}",)

    def _cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:  # noqa: N802
        return (int(self.peers_reach and device != peer),)

    def _cuCtxGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        return (_ordinal(self.current[-1]),)

    def _cuMemcpyPeerAsync(  # noqa: N802
        self, target: int, to: Any, source: int, of: Any, num_bytes: int, stream: int
    ) -> tuple[Any, ...]:
        ctypes.memmove(target, source, num_bytes)
        return ()

    def _cuEventCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return (next(self._events),)

    def _cuDeviceGetAttribute(self, attribute: int, device: Any) -> tuple[Any, ...]:  # noqa: N802
        return (self.sm // 10 if attribute == 75 else self.sm % 10,)

    def _cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:  # noqa: N802
        self.current.append(context)
        return ()

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return (self.current.pop(),)

    def _cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:  # noqa: N802
        block = ctypes.create_string_buffer(num_bytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self._memory[address] = block
        return (address,)

    def _cuMemFree(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        del self._memory[address]
        return ()

    def _cuMemsetD8Async(self, address: int, value: int, num_bytes: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if not self._recorded("cuMemsetD8Async", (address, value, num_bytes, stream)) and address in self._memory:
            ctypes.memset(address, value, num_bytes)
        return ()

    def _cuMemcpyHtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        ctypes.memmove(target, source, num_bytes)
        return ()

    def _cuMemcpyDtoHAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        ctypes.memmove(target, source, num_bytes)
        return ()

    def _cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return (next(self._streams),)

    def _cuLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        self._recorded("cuLaunchKernel", arguments)
        return ()

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:  # noqa: N802
        self.capturing = True
        self._count += 1
        self.captured[f"graph {self._count}"] = []
        return ()

    def _cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.capturing = False
        return (f"graph {self._count}",)

    def _cuGraphInstantiate(self, graph: str, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return (graph,)

    def _cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        return (image,)

    def _cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return (name.decode(),)

    def _recorded(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if self.capturing:
            self.captured[f"graph {self._count}"].append((name, arguments))
        return self.capturing


def _ordinal(context: Any) -> int:
    return int(str(context).split()[-1])


def _default(name: str) -> tuple[Any, ...]:
    result = _RESULTS.get(name)
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)
