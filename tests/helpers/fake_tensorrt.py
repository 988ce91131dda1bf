"""As much of TensorRT's runtime as the stage runner calls; engines cannot be opened without a driver.

An engine knows the stage it stands for. Running it enqueues one kernel on the recorded driver, which stands for
everything the engine would enqueue, so that order, streams and captures can be seen.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from cuda_recorder import RecordedDriver

from engram_trt.configs.tensors import StageSpec

Weight = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a bound weight."""


class DataType(Enum):
    """Names as TensorRT has them."""

    BOOL = "bool"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT = "float32"
    BF16 = "bfloat16"


class TensorIOMode(Enum):
    """Input or output."""

    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(Enum):
    """Who owns scratch memory."""

    USER_MANAGED = 1


class _Base:
    def __init__(self) -> None:
        """As an interface class of TensorRT."""


class _Registry:
    def register_creator(self, creator: Any, namespace: str) -> bool:
        return True


class FakeContext:
    """An execution context: remembers what was set and how often."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.log: list[str] = []
        self.fails = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.log.append(f"profile {index}")
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.log.append("shape")
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.log.append("address")
        self.addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.log.append("memory")

    def is_stream_capturable(self) -> bool:
        return self.engine.capturable

    def execute_async_v3(self, stream: int) -> bool:
        if self.fails:
            return False
        bound = set(self.addresses)
        assert bound == set(self.engine.names), f"{self.engine.spec.name}: {bound ^ set(self.engine.names)} not bound"
        code = self.engine.driver.cuLaunchKernel(self.engine.spec.kind, *(1,) * 7, stream, (), 0)[0]
        return bool(code == 0)


class FakeEngine:
    """An engine of one stage's interface."""

    def __init__(
        self, spec: StageSpec, weights: list[tuple[str, str, tuple[int, ...]]], driver: RecordedDriver
    ) -> None:
        self.spec, self.driver = spec, driver
        self.dtypes = {t.name: t.dtype for t in (*spec.inputs, *spec.outputs)} | {n: d for n, d, _ in weights}
        self.shapes = {t.name: t.shape for t in (*spec.inputs, *spec.outputs)} | {n: s for n, _, s in weights}
        self.aliases = {t.name: t.alias for t in spec.outputs}
        self.names = [*spec.input_names, *(name for name, _, _ in weights), *spec.output_names]
        self.num_optimization_profiles = 2
        self.device_memory_size_v2 = 4096
        self.capturable = True
        self.contexts: list[FakeContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.OUTPUT if name in self.spec.output_names else TensorIOMode.INPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.dtypes[name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(extent, str) else extent for extent in self.shapes[name])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeTensorRT:
    """The module."""

    __version__ = "11.4.0"
    IPluginV3 = type("IPluginV3", (_Base,), {})
    IPluginV3OneCore = type("IPluginV3OneCore", (_Base,), {})
    IPluginV3OneBuildV2 = type("IPluginV3OneBuildV2", (_Base,), {})
    IPluginV3OneRuntime = type("IPluginV3OneRuntime", (_Base,), {})
    IPluginCreatorV3One = type("IPluginCreatorV3One", (_Base,), {})
    ILogger = type("ILogger", (_Base,), {})
    PluginFieldCollection = list
    DataType = DataType
    TensorIOMode = TensorIOMode
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy

    class PluginFieldType(Enum):
        """Types of fields."""

        INT32 = 1
        INT64 = 2
        FLOAT32 = 3

    def __init__(self, engines: dict[bytes, FakeEngine]) -> None:
        self.engines = engines
        self.opened: list[bytes] = []

    def PluginField(self, name: str, data: Any, kind: Any) -> tuple[Any, ...]:  # noqa: N802
        return name, data, kind

    def get_plugin_registry(self) -> _Registry:
        return _Registry()

    def Runtime(self, logger: Any) -> FakeTensorRT:  # noqa: N802
        return self

    def deserialize_cuda_engine(self, content: bytes) -> FakeEngine | None:
        self.opened.append(content)
        return self.engines.get(content)
