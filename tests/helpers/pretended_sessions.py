"""ONNX Runtime on a GPU, without one: sessions of the CPU on a recorded driver, whose device memory is the host's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import onnxruntime

from engram_trt.runtime.stage_runners.onnxruntime_cuda import PROVIDER

RealSession = onnxruntime.InferenceSession


class HostBinding:
    """Takes device addresses, which the recorded driver has in host memory."""

    def __init__(self, binding: Any, bound: list[tuple[Any, ...]]) -> None:
        self.binding, self.bound = binding, bound

    def bind_input(self, name: str, device: str, *place: Any) -> None:
        self.bound.append((name, device, *place))
        self.binding.bind_input(name, "cpu", 0, *place[1:])

    def bind_output(self, name: str, device: str, *place: Any) -> None:
        self.bound.append((name, device, *place))
        self.binding.bind_output(name, "cpu", 0, *place[1:])


class PretendedSession:
    """A session of the CPU that says it runs on a GPU."""

    providers: ClassVar[list[Any]] = []
    bound: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, path: str, options: Any, providers: Sequence[Any]) -> None:
        PretendedSession.providers.append(providers[0])
        self.session = RealSession(path, options, providers=["CPUExecutionProvider"])
        self.get_inputs, self.get_outputs = self.session.get_inputs, self.session.get_outputs

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def io_binding(self) -> HostBinding:
        return HostBinding(self.session.io_binding(), PretendedSession.bound)

    def run_with_iobinding(self, binding: HostBinding) -> None:
        self.session.run_with_iobinding(binding.binding)
