"""Stages as TensorRT engines on one GPU: buffers and addresses fixed once, decode steps replayed as CUDA graphs.

Stages of a kind share an engine and bind their own weights. All stages of one device run on one stream, so hidden
states, lists and caches pass from one to the next on the device, in order, without an event or a host copy. A chain
over several GPUs has a back end for each; what crosses between them is in `tensorrt_peers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engram_trt.configs.errors import BackendError, RequestError
from engram_trt.configs.tensors import ITEM_BYTES, StageSpec
from engram_trt.plugins.tensorrt_api import TENSORRT, TENSORRT_RTX, TensorRT, load
from engram_trt.plugins.trt_classes import PluginHost
from engram_trt.plugins.trt_kernels import KernelLibrary
from engram_trt.plugins.trt_launch import KernelLauncher
from engram_trt.plugins.trt_registration import register_plugins
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import Backend, ResidentArrays, Run, StageRunner, View
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend, device_ordinal
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer, device_buffer
from engram_trt.runtime.stage_runners.tensorrt_engines import OpenBuild, check_engine, choose_build, open_engine
from engram_trt.runtime.stage_runners.tensorrt_graphs import StageGraphs
from engram_trt.runtime.stage_runners.tensorrt_manifest import KERNELS_FOLDER, Profiles, StageEngine
from engram_trt.runtime.stage_runners.tensorrt_peers import PeerCopies

GRAPH_PROFILE = "decode"
"""Steps under this profile are captured; others have too many shapes to keep."""


class TensorRTStageRunner(StageRunner):
    """One stage: a context per profile on a shared engine.

    Args:
        spec: the stage.
        engine: an `ICudaEngine`, checked.
        profiles: by name, in the engine's order.
        weights: binding name -> buffer of every dense weight.
        backend: owns device, stream and scratch memory.
    """

    def __init__(
        self,
        spec: StageSpec,
        engine: Any,
        profiles: Profiles,
        weights: Mapping[str, DeviceBuffer],
        backend: TensorRTBackend,
    ) -> None:
        self.spec, self.engine, self.profiles, self.weights, self.backend = spec, engine, profiles, weights, backend
        self.graphs = StageGraphs(spec.name, backend.driver, backend.stream)
        self._contexts: dict[str, Any] = {}
        self._applied: dict[str, tuple[Any, ...]] = {}

    def bind(self, views: Mapping[str, View]) -> Run:
        """See `StageRunner.bind`.

        Raises:
            RequestError: a size outside every profile, naming the symbol and its bounds.
        """
        for tensor in self.spec.outputs:
            if tensor.alias is not None and _place(views[tensor.name]) != _place(views[tensor.alias]):
                raise ValueError(f"{self.spec.name}: {tensor.name} is not bound to the memory of {tensor.alias}")
        profile = self._profile(views)
        bindings = tuple((name, *_place(views[name])) for name in (*self.spec.input_names, *self.spec.output_names))
        key = (profile, bindings)
        context = self._context(profile)
        captures, stream = profile == GRAPH_PROFILE, self.backend.stream

        def enqueue() -> None:
            if not context.execute_async_v3(stream):
                raise self.backend.failure(self.spec.name)

        def run() -> None:
            with self.backend.driver.guard():
                if captures and self.graphs.replay(key):
                    return
                is_settled = self._apply(profile, bindings, context)
                if captures and is_settled:
                    self.graphs.capture_and_run(key, enqueue, lambda: _capturable(context))
                else:
                    enqueue()

        # Addresses are raw numbers: keep the buffers alive as long as the function.
        run.__dict__["views"] = dict(views)
        return run

    def close(self) -> None:
        """Give graphs and contexts back, before the engine."""
        self.graphs.close()
        self._contexts.clear()

    def _profile(self, views: Mapping[str, View]) -> str:
        sizes: dict[str, int] = {}
        for tensor in self.spec.inputs:
            for symbol, extent in zip(tensor.shape, views[tensor.name].shape, strict=True):
                if isinstance(symbol, str):
                    sizes[symbol] = extent
        outside: list[tuple[str, int, int, int]] = []
        for name, ranges in self.profiles.items():
            wrong = [
                (symbol, sizes[symbol], low, high)
                for symbol, (low, _, high) in ranges.items()
                if not low <= sizes[symbol] <= high
            ]
            if not wrong:
                return name
            outside = wrong
        symbol, value, low, high = outside[0]
        raise RequestError(
            f"{self.spec.name}: {symbol}",
            found=str(value),
            expected=f"{low}..{high}, what the engine was built for",
            remedy="Stay within the limits, or export and build with larger ones.",
        )

    def _context(self, profile: str) -> Any:
        if profile not in self._contexts:
            with self.backend.driver.guard():
                strategy = self.backend.api.module.ExecutionContextAllocationStrategy.USER_MANAGED
                context = self.engine.create_execution_context(strategy)
                if context is None:
                    raise self.backend.failure(self.spec.name)
                index = list(self.profiles).index(profile)
                if not context.set_optimization_profile_async(index, self.backend.stream):
                    raise self.backend.failure(self.spec.name)
                for name, buffer in self.weights.items():
                    self._set_address(context, name, buffer.address)
                self._contexts[profile] = context
        return self._contexts[profile]

    def _apply(self, profile: str, bindings: tuple[Any, ...], context: Any) -> bool:
        """Set shapes and addresses; True if they were set: a context is shared by the shapes of its profile."""
        if self._applied.get(profile) == bindings:
            return True
        inputs = set(self.spec.input_names)
        for name, address, shape in bindings:
            if name in inputs and not context.set_input_shape(name, shape):
                raise self.backend.failure(f"{self.spec.name}: shape {list(shape)} of {name}")
            self._set_address(context, name, address)
        size = max(int(self.engine.device_memory_size_v2), 1)
        context.set_device_memory(self.backend.scratch(size), size)
        self._applied[profile] = bindings
        return False

    def _set_address(self, context: Any, name: str, address: int) -> None:
        if not context.set_tensor_address(name, address):
            raise self.backend.failure(f"{self.spec.name}: address of {name}")


def _place(view: View) -> tuple[int, tuple[int, ...]]:
    return device_buffer(view).address, view.shape


def _capturable(context: Any) -> bool:
    """TensorRT-RTX can tell; TensorRT refuses at the capture itself."""
    answer = getattr(context, "is_stream_capturable", True)
    return bool(answer() if callable(answer) else answer)


class TensorRTBackend(DeviceBackend):
    """Opens engines on one GPU and binds weights.

    Args:
        api: the loaded TensorRT.
        driver: of the GPU.
        build: engines that fit both.
        data_files: stage name -> file of its dense weights.
        resident_arrays: supplies resident weights, once per tensor.
    """

    name = "tensorrt"

    def __init__(
        self,
        api: TensorRT,
        driver: CudaDriver,
        build: OpenBuild,
        data_files: Mapping[str, Path],
        resident_arrays: ResidentArrays,
    ) -> None:
        super().__init__(driver, resident_arrays)
        self.api, self.build, self.data_files = api, build, data_files
        self.name = api.backend
        self.messages: list[str] = []
        """Errors TensorRT has reported."""
        with driver.guard():
            library = KernelLibrary(build.folder / KERNELS_FOLDER, build.manifest.kernels)
            launcher = KernelLauncher(library, driver, driver.compute_capability)
            self.host: PluginHost = register_plugins(api, launcher=launcher)
            self.runtime = api.module.Runtime(_logger(api, self.messages))
        self._engines: dict[str, Any] = {}
        self._runners: list[TensorRTStageRunner] = []
        self._scratch: DeviceBuffer | None = None
        self._peers = PeerCopies(driver, self.stream)

    def load(self, spec: StageSpec) -> StageRunner:
        """See `Backend.load`; ArtifactError for a plan that is damaged or another stage's."""
        built, plan = self.build.engine_of(spec.name), self.build.manifest.plan_of(spec.name)
        with self.driver.guard():
            if plan.key not in self._engines:
                self._engines[plan.key] = open_engine(self.api, self.runtime, self.build, plan)
            engine = self._engines[plan.key]
            check_engine(self.api, engine, spec, built, plan)
            weights = self._weights(built)
        runner = TensorRTStageRunner(spec, engine, plan.profiles, weights, self)
        self._runners.append(runner)
        return runner

    def transfer(self, source: View, target: View) -> Run:
        """See `Backend.transfer`: from another GPU without the host."""
        if not isinstance(source.buffer, DeviceBuffer):
            return super().transfer(source, target)
        num_bytes = math.prod(source.shape) * ITEM_BYTES[source.buffer.dtype]
        return self._peers.bind(source.buffer, device_buffer(target), num_bytes)

    def scratch(self, num_bytes: int) -> int:
        """Scratch memory that stages share, for they run one after the other; it grows, and never moves under a
        captured graph: an outgrown piece stays until the back end is closed."""
        if self._scratch is None or self._scratch.num_bytes < num_bytes:
            largest = max([num_bytes, *(int(engine.device_memory_size_v2) for engine in self._engines.values())])
            self._scratch = self.reserve("int8", largest, "scratch memory of the engines")
        return self._scratch.address

    def failure(self, where: str) -> BackendError:
        """The error for a call that TensorRT says has failed, with what is known about it."""
        launcher = self.host.launcher
        reasons = [str(launcher.last_error)] if launcher is not None and launcher.last_error is not None else []
        reasons += self.messages[-3:]
        self.messages.clear()
        if launcher is not None:
            launcher.last_error = None
        return BackendError(
            where,
            found="; ".join(reasons) or "a refusal without a message",
            expected="a step that runs",
            remedy="Nothing of the session was changed; report it with this message.",
        )

    def release(self) -> None:
        """Graphs and contexts go before the memory they point to, and engines before the runtime."""
        self._peers.close()
        for runner in self._runners:
            runner.close()
        self._runners.clear()
        self._engines.clear()
        self._scratch = None

    def _weights(self, built: StageEngine) -> dict[str, DeviceBuffer]:
        found = {}
        data = _mapped(self.data_files[built.stage])
        small = None if built.small_weights is None else _mapped(built.small_weights.verify(self.build.folder))
        for weight in built.weights:
            buffer = self.reserve(weight.dtype, math.prod(weight.shape), f"weights of {built.stage}")
            source = small if weight.is_small else data
            if source is None or weight.offset + buffer.num_bytes > source.size:
                raise BackendError(
                    f"{built.stage}: {weight.name}",
                    found="a weight outside its file",
                    expected=f"{buffer.num_bytes} bytes at {weight.offset}",
                    remedy="Run `engram-trt build` again.",
                )
            buffer.write_bytes(source[weight.offset : weight.offset + buffer.num_bytes])
            found[weight.name] = buffer
        return found


def _mapped(path: Path) -> Any:
    return np.memmap(path, dtype=np.int8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.int8)


def _logger(api: TensorRT, messages: list[str]) -> Any:
    trt = api.module

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if str(severity).endswith("ERROR"):
                messages.append(message.strip())

    return Logger()


def open_tensorrt(
    artifact: Artifact, backend: str, driver: CudaDriver | None = None, device: str | None = None
) -> TensorRTBackend:
    """The back end for an artefact on one GPU of this machine.

    Args:
        artifact: with a build that fits.
        backend: TensorRT's module name.
        driver: of the GPU; opened if None.
        device: `cuda:N`; the first GPU if None.

    Raises:
        BackendError: TensorRT, the driver or the GPU is missing.
        ArtifactError: no build fits, or it is damaged.
    """
    api = load(backend)
    driver = driver or CudaDriver.open(device_ordinal(backend, device))
    manifest = artifact.manifest
    stages = [record.spec.name for record in manifest.stages]
    build = choose_build(artifact.root, manifest.digest, stages, api, driver.compute_capability)
    files = {record.spec.name: (artifact.root / record.data.path).resolve() for record in manifest.stages}
    return TensorRTBackend(api, driver, build, files, artifact.resident)


def tensorrt_backend(artifact: Artifact, device: str | None = None) -> Backend:
    """The entry point of back end `tensorrt`."""
    return open_tensorrt(artifact, TENSORRT, device=device)


def tensorrt_rtx_backend(artifact: Artifact, device: str | None = None) -> Backend:
    """The entry point of back end `tensorrt_rtx`."""
    return open_tensorrt(artifact, TENSORRT_RTX, device=device)
