"""NCCL's calls in their order, on a stand-in for torch's: which group, after what, and what is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_recorder import RecordedDriver

from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.distributed.payload import DeviceBytes
from engram_trt.runtime.distributed.torch_transport import NcclTransport, nccl_place
from engram_trt.runtime.stage_runners.contract import StageRunner
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend


class Torch:
    """The part of torch that a transport calls; tensors are real, on the host, as the recorded driver's memory is."""

    uint8 = torch.uint8
    from_numpy = staticmethod(torch.from_numpy)

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls, self.current = calls, ""
        self.distributed = SimpleNamespace(isend=self._isend, recv=self._recv, is_nccl_available=lambda: True)
        self.cuda = SimpleNamespace(
            device=self._device, current_stream=lambda: self._stream(), is_available=lambda: True
        )

    def empty(self, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        self.calls.append(("empty", size, device))
        return torch.zeros(size, dtype=dtype)

    @contextmanager
    def _device(self, device: str) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def _stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.calls.append(("synchronize", self.current)))

    def _isend(self, tensor: torch.Tensor, rank: int, group: str = "gloo") -> Any:
        self.calls.append(("isend", tuple(tensor.tolist()), rank, group, self.current))
        return SimpleNamespace(wait=lambda: self.calls.append(("wait", group)))

    def _recv(self, tensor: torch.Tensor, rank: int, group: str = "gloo") -> None:
        self.calls.append(("recv", tensor.numel(), rank, group, self.current))
        tensor.fill_(7)


class Watch:
    def raise_broken(self, error: Exception) -> None:
        raise error


class Gpu(DeviceBackend):
    """A GPU without stages."""

    name = "gpu"

    def load(self, spec: StageSpec) -> StageRunner:
        raise AssertionError(f"{spec.name} is loaded")


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def transport(calls: list[tuple[Any, ...]]) -> NcclTransport:
    driver = RecordedDriver(num_devices=2)
    backend = Gpu(CudaDriver(driver, 1), lambda spec, name: np.empty(0))
    made = NcclTransport(Torch(calls), 2, 0, Watch(), backend, "out", "in")  # type: ignore[arg-type]
    synchronize = backend.driver.synchronize

    def recorded(stream: int) -> None:
        calls.append(("settle", stream))
        synchronize(stream)

    backend.driver.synchronize = recorded  # type: ignore[method-assign]
    return made


def test_a_payload_leaves_behind_its_header_once_it_is_packed(
    transport: NcclTransport, calls: list[tuple[Any, ...]]
) -> None:
    payload = transport.memory(8)
    assert isinstance(payload, DeviceBytes)
    payload.owner[:] = torch.arange(8, dtype=torch.uint8)
    wait = transport.send(np.array([5, 6]), payload[2:5])
    assert calls == [
        ("empty", 8, "cuda:1"),
        ("isend", (5, 6), 2, "gloo", ""),
        ("settle", payload.stream),
        ("isend", (2, 3, 4), 2, "out", "cuda:1"),
    ]
    calls.clear()
    wait()
    assert calls == [("wait", "gloo"), ("wait", "out"), ("synchronize", "cuda:1")]


def test_a_payload_has_arrived_when_receiving_returns(transport: NcclTransport, calls: list[tuple[Any, ...]]) -> None:
    header, payload = np.zeros(2, dtype=np.int64), transport.memory(8)
    assert isinstance(payload, DeviceBytes)
    calls.clear()
    transport.receive(header)
    transport.receive(payload[:6])
    assert calls == [
        ("recv", 2, 0, "gloo", ""),
        ("recv", 6, 0, "in", "cuda:1"),
        ("synchronize", "cuda:1"),
    ]
    assert payload.owner.tolist() == [7] * 6 + [0, 0]


def test_a_message_without_a_payload_is_a_header(transport: NcclTransport, calls: list[tuple[Any, ...]]) -> None:
    transport.send(np.array([1]), transport.memory(0))()
    assert [call[0] for call in calls] == ["empty", "isend", "wait"]


def test_only_a_gpu_with_nccl_has_a_place(transport: NcclTransport, calls: list[tuple[Any, ...]]) -> None:
    backend, module = transport._backend, Torch(calls)
    assert nccl_place(module, backend).endswith(" cuda:1")
    assert nccl_place(module, SimpleNamespace()) == ""  # type: ignore[arg-type]
    module.cuda.is_available = lambda: False
    assert nccl_place(module, backend) == ""
