"""Launch an op's plan with precompiled kernels on a stream: no Triton, no allocation, no synchronisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engram_trt.plugins.kernels.checks import Inputs, require
from engram_trt.plugins.kernels.plan import (
    BYTES_OF,
    Clear,
    Launch,
    LaunchPlan,
    Pointer,
    TensorInfo,
    Variant,
    pack_arguments,
)
from engram_trt.plugins.spec import AttributeValue
from engram_trt.plugins.trt_contract import OpPlugin
from engram_trt.plugins.trt_kernels import KernelLibrary, KernelRecord

ALIGNMENT = 16


class LaunchDriver(Protocol):
    """What of the CUDA driver a launch needs."""

    ordinal: int
    """Of its device."""

    def current_ordinal(self) -> int:
        """Of the device that is current in this thread."""

    def load_function(self, image: bytes, entry: str, shared_bytes: int) -> Any:
        """Load machine code and return its entry, allowed to use that much dynamic shared memory."""

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

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Enqueue filling with zero bytes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a plugin.

    Attributes:
        plugin: the op.
        attributes: values by name.
        inputs: shape and dtype of each input, in order.
        input_addresses, output_addresses: device addresses, in order.
        workspace: device address of the scratch memory.
        stream: where to enqueue.
    """

    plugin: OpPlugin
    attributes: Mapping[str, AttributeValue]
    inputs: tuple[TensorInfo, ...]
    input_addresses: Sequence[int]
    output_addresses: Sequence[int]
    workspace: int
    stream: int


class KernelLauncher:
    """Kernels of one GPU, loaded, and the plans made so far.

    Loading happens here and not at a launch: it would synchronise, which a stream under capture refuses.

    Args:
        library: compiled kernels.
        driver: enqueues.
        sm: compute capability of the GPU.
    """

    def __init__(self, library: KernelLibrary, driver: LaunchDriver, sm: int) -> None:
        self.driver, self.sm = driver, sm
        self.last_error: Exception | None = None
        """What went wrong in the latest failed launch: TensorRT reports only that a plugin failed."""
        self._functions: dict[str, Any] = {}
        self._plans: dict[tuple[Any, ...], LaunchPlan] = {}
        self._of_device: dict[int, KernelLauncher] = {}
        self._libraries = [library]
        for record in library:
            if record.sm == sm and record.sha256 not in self._functions:
                image = library.image(record)
                self._functions[record.sha256] = driver.load_function(image, record.entry, record.shared_bytes)

    def adopt(self, other: KernelLauncher) -> None:
        """Take over the kernels another launcher has loaded on the same GPU, or its launches on another one."""
        if other.driver.ordinal != self.driver.ordinal:
            self._of_device[other.driver.ordinal] = other
            return
        self._functions = {**other._functions, **self._functions}
        self._libraries.extend(other._libraries)

    def run(self, call: Call) -> None:
        """Enqueue the kernels of one call, in the order of its plan; on the device that is current, for loaded code
        belongs to one.

        Raises:
            KernelError: shapes, dtypes or addresses no kernel takes, or a kernel is missing.
            BackendError: the driver refused a launch.
        """
        if self._of_device:
            other = self._of_device.get(self.driver.current_ordinal())
            if other is not None:
                other.run(call)
                return
        plan = self._plan(call)
        spec = call.plugin.spec
        addresses = dict(zip(spec.input_names, call.input_addresses, strict=False))
        addresses |= dict(zip(spec.output_names, call.output_addresses, strict=False))
        for output, source in spec.aliases.items():
            require(
                addresses[output] == addresses[source],
                spec.name,
                f"{output} address",
                found=f"{addresses[output]:#x}",
                expected=f"{addresses[source]:#x}, the buffer of {source}, which is updated in place",
                remedy="Bind both names to one buffer.",
            )
        addresses |= {buffer.name: call.workspace + buffer.offset_bytes for buffer in plan.workspace}
        sizes = {buffer.name: buffer.info.num_bytes for buffer in plan.workspace}
        for step in plan.steps:
            if isinstance(step, Clear):
                self.driver.clear(addresses[step.buffer], sizes[step.buffer], call.stream)
            else:
                self._launch(step, addresses, call.stream)

    def _plan(self, call: Call) -> LaunchPlan:
        key = (call.plugin.spec.name, tuple(call.attributes.values()), call.inputs)
        plan = self._plans.get(key)
        if plan is None:
            inputs: Inputs = call.plugin.named_inputs(call.inputs)
            plan = self._plans[key] = call.plugin.planner.plan(inputs, call.attributes, self.sm)
        return plan

    def _record(self, variant: Variant) -> KernelRecord:
        for library in self._libraries[1:]:
            if library.has(variant, self.sm):
                return library.find(variant, self.sm)
        return self._libraries[0].find(variant, self.sm)

    def _launch(self, step: Launch, addresses: Mapping[str, int], stream: int) -> None:
        record = self._record(step.variant)
        for (parameter, _), argument in zip(step.variant.signature, step.arguments, strict=True):
            if isinstance(argument, Pointer) and parameter not in step.variant.unaligned:
                address = addresses[argument.tensor]
                require(
                    address % ALIGNMENT == 0,
                    step.variant.op,
                    f"{argument.tensor} address",
                    found=f"{address:#x}",
                    expected=f"a multiple of {ALIGNMENT}, for {ALIGNMENT}-byte loads",
                    remedy="Bind a buffer of its own.",
                )
        self.driver.launch(
            self._functions[record.sha256],
            step.grid,
            record.num_threads,
            record.shared_bytes,
            stream,
            pack_arguments(step, addresses),
        )


def tensor_info(shape: Sequence[int], dtype: str) -> TensorInfo:
    """Shape and dtype of a bound tensor; KeyError for a dtype no contract has."""
    return TensorInfo(shape=tuple(shape), dtype={name: name for name in BYTES_OF}[dtype])
