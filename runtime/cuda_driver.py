"""The CUDA driver through `cuda.bindings`: every error code becomes an error, every call runs on one device.

Nothing else in the package talks to the driver, so a stand-in for the module `cuda.bindings.driver` is enough to
run everything above it without a GPU.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engram_trt.configs.errors import BackendError

DEFAULT_SHARED_BYTES = 48 << 10
"""Dynamic shared memory a kernel may use without asking for more."""


class CudaError(BackendError):
    """The driver refused a call."""


class CudaDriver:
    """One device.

    Args:
        api: the module `cuda.bindings.driver`, or a stand-in.
        ordinal: of the device.

    Raises:
        CudaError: no such device.
    """

    def __init__(self, api: Any, ordinal: int = 0) -> None:
        self.api, self.ordinal = api, ordinal
        self._depth = threading.local()
        self._call(api.cuInit, 0)
        count = self._call(api.cuDeviceGetCount)
        if not 0 <= ordinal < count:
            raise CudaError(
                f"cuda:{ordinal}",
                found=f"{count} device(s)",
                expected=f"a device {ordinal}",
                remedy="Name a device that exists, or check CUDA_VISIBLE_DEVICES.",
            )
        device = self._call(api.cuDeviceGet, ordinal)
        kinds = api.CUdevice_attribute
        major = self._call(api.cuDeviceGetAttribute, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call(api.cuDeviceGetAttribute, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        self.compute_capability = 10 * int(major) + int(minor)
        self._device = device
        self._context = self._call(api.cuDevicePrimaryCtxRetain, device)

    @classmethod
    def open(cls, ordinal: int = 0) -> CudaDriver:
        """Load `cuda.bindings` and take a device.

        Raises:
            BackendError: the package or the driver is missing.
        """
        try:
            api = importlib.import_module("cuda.bindings.driver")
            api.cuInit(0)
        except (ImportError, OSError, RuntimeError) as error:
            raise BackendError(
                "CUDA",
                found=f"no usable driver ({str(error).splitlines()[0]})",
                expected="cuda-bindings and an NVIDIA driver",
                remedy="pip install cuda-bindings, on a machine with a GPU.",
            ) from None
        return cls(api, ordinal)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the driver; its one result, a tuple of several, or None.

        Raises:
            CudaError: with the driver's own name and words for the code.
        """
        code, *results = function(*arguments)
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(
                f"cuda:{self.ordinal}: {getattr(function, '__name__', function)}",
                found=self._name_of(code),
                expected="success",
                remedy="See the error's meaning in the CUDA driver API; out of memory: lower the limits.",
            )
        return results[0] if len(results) == 1 else tuple(results) or None

    def _name_of(self, code: Any) -> str:
        words = []
        for function in (self.api.cuGetErrorName, self.api.cuGetErrorString):
            known, text = function(code)
            if known == self.api.CUresult.CUDA_SUCCESS and text is not None:
                words.append(text.decode() if isinstance(text, bytes) else str(text))
        return ": ".join(words) or str(code)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Make the device current; inside another guard of the same thread it is already."""
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            self._call(self.api.cuCtxPushCurrent, self._context)
        self._depth.value = depth + 1
        try:
            yield
        finally:
            self._depth.value = depth
            if depth == 0:
                self._call(self.api.cuCtxPopCurrent)

    # --- memory -------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, purpose: str) -> int:
        """Device memory; CudaError names what it was for and how much is free."""
        with self.guard():
            try:
                return int(self._call(self.api.cuMemAlloc, max(num_bytes, 1)))
            except CudaError as error:
                free, total = self._call(self.api.cuMemGetInfo)
                raise CudaError(
                    f"cuda:{self.ordinal}: {purpose}",
                    found=f"{error.found}; {free:,} of {total:,} bytes free",
                    expected=f"room for {num_bytes:,} bytes",
                    remedy="Lower the deployment's limits, or free the GPU.",
                ) from None

    def free(self, address: int) -> None:
        """Give memory back."""
        with self.guard():
            self._call(self.api.cuMemFree, address)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Enqueue filling with zero bytes."""
        with self.guard():
            self._call(self.api.cuMemsetD8Async, address, 0, num_bytes, stream)

    def copy_to_device(self, address: int, host: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from host memory; the driver has taken pageable memory over when this returns."""
        with self.guard():
            self._call(self.api.cuMemcpyHtoDAsync, address, host, num_bytes, stream)

    def copy_to_host(self, host: int, address: int, num_bytes: int, stream: int) -> None:
        """Copy to host memory and wait for it."""
        with self.guard():
            self._call(self.api.cuMemcpyDtoHAsync, host, address, num_bytes, stream)
            self._call(self.api.cuStreamSynchronize, stream)

    def copy_from(self, peer: CudaDriver, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from another device's memory; the driver goes through the host only without `reach`."""
        with self.guard():
            self._call(self.api.cuMemcpyPeerAsync, target, self._context, source, peer._context, num_bytes, stream)

    def reach(self, peer: CudaDriver) -> bool:
        """Let this device read another's memory directly; False where the hardware cannot."""
        if not self._call(self.api.cuDeviceCanAccessPeer, self._device, peer._device):
            return False
        try:
            with self.guard():
                self._call(self.api.cuCtxEnablePeerAccess, peer._context, 0)
        except CudaError as error:
            if "ALREADY_ENABLED" not in error.found:
                raise
        return True

    def current_ordinal(self) -> int:
        """Of the device that is current in this thread."""
        return int(self._call(self.api.cuCtxGetDevice))

    # --- streams, events and graphs -----------------------------------------------------------------------

    def create_event(self) -> Any:
        """An event that orders streams and keeps no time."""
        with self.guard():
            return self._call(self.api.cuEventCreate, 2)

    def record_event(self, event: Any, stream: int) -> None:
        """Let an event stand for all that is on a stream of this device so far."""
        with self.guard():
            self._call(self.api.cuEventRecord, event, stream)

    def wait_event(self, event: Any, stream: int) -> None:
        """Let a stream of this device wait for an event of any; the host goes on."""
        with self.guard():
            self._call(self.api.cuStreamWaitEvent, stream, event, 0)

    def destroy_event(self, event: Any) -> None:
        """Give an event back."""
        with self.guard():
            self._call(self.api.cuEventDestroy, event)

    def create_stream(self) -> int:
        """A stream that does not wait for the legacy one."""
        with self.guard():
            return int(self._call(self.api.cuStreamCreate, 1))

    def synchronize(self, stream: int) -> None:
        """Wait for everything on a stream."""
        with self.guard():
            self._call(self.api.cuStreamSynchronize, stream)

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back."""
        with self.guard():
            self._call(self.api.cuStreamDestroy, stream)

    def capture(self, stream: int, enqueue: Callable[[], None]) -> Any:
        """Record what `enqueue` puts on a stream into an executable graph; nothing of it runs.

        Raises:
            CudaError: something in it cannot be captured.
            Exception: whatever `enqueue` raises; the capture is ended either way.
        """
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with self.guard():
            self._call(self.api.cuStreamBeginCapture, stream, mode)
            try:
                enqueue()
            except BaseException:
                # The error matters, not the graph that came of it.
                code, graph = self.api.cuStreamEndCapture(stream)
                if code == self.api.CUresult.CUDA_SUCCESS:
                    self._call(self.api.cuGraphDestroy, graph)
                raise
            graph = self._call(self.api.cuStreamEndCapture, stream)
            try:
                return self._call(self.api.cuGraphInstantiate, graph, 0)
            finally:
                self._call(self.api.cuGraphDestroy, graph)

    def launch_graph(self, executable: Any, stream: int) -> None:
        """Enqueue a captured graph."""
        with self.guard():
            self._call(self.api.cuGraphLaunch, executable, stream)

    def destroy_graph(self, executable: Any) -> None:
        """Give a captured graph back."""
        with self.guard():
            self._call(self.api.cuGraphExecDestroy, executable)

    # --- kernels (the `LaunchDriver` of the plugins) ------------------------------------------------------

    def load_function(self, image: bytes, entry: str, shared_bytes: int) -> Any:
        """Load machine code and return its entry, allowed to use that much dynamic shared memory."""
        with self.guard():
            module = self._call(self.api.cuModuleLoadData, image)
            function = self._call(self.api.cuModuleGetFunction, module, entry.encode())
            if shared_bytes > DEFAULT_SHARED_BYTES:
                attribute = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call(self.api.cuFuncSetAttribute, function, attribute, shared_bytes)
            return function

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        stream: int,
        arguments: tuple[tuple[int | float, ...], tuple[Any, ...]],
    ) -> None:
        """Enqueue a kernel; arguments are values and C types."""
        with self.guard():
            self._call(self.api.cuLaunchKernel, function, *grid, num_threads, 1, 1, shared_bytes, stream, arguments, 0)


def local_compute_capability() -> int | None:
    """Compute capability of this machine's first GPU; None without a usable one."""
    try:
        return CudaDriver.open().compute_capability
    except BackendError:
        return None
