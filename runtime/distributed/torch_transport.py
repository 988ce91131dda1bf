"""Messages and exchanges of `torch.distributed`: Gloo on host memory, NCCL from GPU to GPU.

torch comes as an argument: nothing here needs it before several processes have met.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram_trt.runtime.distributed.expert_lane import AllToAll
from engram_trt.runtime.distributed.mail import Transport
from engram_trt.runtime.distributed.payload import Bytes, DeviceBytes, Payload
from engram_trt.runtime.distributed.watch import Watch
from engram_trt.runtime.distributed.wire import Integers
from engram_trt.runtime.stage_runners.contract import Backend
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend


class TorchTransport(Transport):
    """Point-to-point messages of the default process group, which is Gloo's, on host memory.

    Args:
        module: torch.
        following, before: ranks.
        watch: knows why a connection broke.
    """

    def __init__(self, module: Any, following: int, before: int, watch: Watch) -> None:
        self._torch, self._following, self._before, self._watch = module, following, before, watch

    def send(self, header: Integers, payload: Payload) -> Callable[[], None]:
        try:
            waits = [self._begin(array) for array in (header, payload) if array.size]
        except RuntimeError as error:
            self._watch.raise_broken(error)

        def wait() -> None:
            try:
                for wait_for_one in waits:
                    wait_for_one()
            except RuntimeError as error:
                self._watch.raise_broken(error)

        return wait

    def receive(self, target: Integers | Payload) -> None:
        self._torch.distributed.recv(self._torch.from_numpy(target), self._before)

    def _begin(self, array: Integers | Payload) -> Callable[[], object]:
        """Begin to send one array; the function waits until it has left."""
        wait: Callable[[], object] = self._torch.distributed.isend(self._torch.from_numpy(array), self._following).wait
        return wait


class NcclTransport(TorchTransport):
    """Headers on host memory as before; payloads stay on the GPUs.

    Each of the two directions between neighbours has a process group of its own. Operations of one group run in
    order: in a common one, a rank that waits for a message would hold back the one it has to send first.

    Args:
        module, following, before, watch: as for `TorchTransport`.
        backend: of this rank's GPU.
        outgoing, incoming: process groups of NCCL with the rank behind, with the one before.
    """

    def __init__(
        self,
        module: Any,
        following: int,
        before: int,
        watch: Watch,
        backend: DeviceBackend,
        outgoing: Any,
        incoming: Any,
    ) -> None:
        super().__init__(module, following, before, watch)
        self._backend, self._outgoing, self._incoming = backend, outgoing, incoming
        self._device = f"cuda:{backend.driver.ordinal}"

    def memory(self, num_bytes: int) -> Payload:
        tensor = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self._device)
        driver, stream = self._backend.driver, self._backend.stream
        return DeviceBytes(int(tensor.data_ptr()), num_bytes, driver, stream, tensor)

    def receive(self, target: Integers | Payload) -> None:
        if not isinstance(target, DeviceBytes):
            super().receive(target)
            return
        with self._torch.cuda.device(self._device):
            self._torch.distributed.recv(_tensor(target), self._before, group=self._incoming)
            self._settle()

    def _begin(self, array: Integers | Payload) -> Callable[[], object]:
        if not isinstance(array, DeviceBytes):
            return super()._begin(array)
        array.settle()  # NCCL's stream knows nothing of the one on which the tensors were packed
        with self._torch.cuda.device(self._device):
            work = self._torch.distributed.isend(_tensor(array), self._following, group=self._outgoing)

        def wait() -> None:
            with self._torch.cuda.device(self._device):
                work.wait()
                self._settle()

        return wait

    def _settle(self) -> None:
        """Work is done for NCCL when it is enqueued: wait for the GPU as well."""
        self._torch.cuda.current_stream().synchronize()


class TorchAllToAll(AllToAll):
    """All-to-all of a process group, on host memory.

    Args:
        module: torch.
        group: the process group.
        members: its ranks.
        watch: knows why a connection broke.
    """

    def __init__(self, module: Any, group: Any, members: tuple[int, ...], watch: Watch) -> None:
        self._torch, self._group, self.members, self._watch = module, group, members, watch

    def exchange(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        sent = np.concatenate(parts)
        received = np.empty(sum(sizes), dtype=np.uint8)
        try:
            self._torch.distributed.all_to_all_single(
                self._torch.from_numpy(received),
                self._torch.from_numpy(sent),
                list(sizes),
                [part.size for part in parts],
                group=self._group,
            )
        except RuntimeError as error:
            self._watch.raise_broken(error)
        return np.split(received, np.cumsum(sizes[:-1]))


def nccl_place(module: Any, backend: Backend) -> str:
    """Host and GPU of a rank that could send by NCCL; empty for one that could not."""
    if not isinstance(backend, DeviceBackend):
        return ""
    if not module.cuda.is_available() or not module.distributed.is_nccl_available():
        return ""
    return f"{socket.gethostname()} cuda:{backend.driver.ordinal}"


def _tensor(memory: DeviceBytes) -> Any:
    """The part of the owner's tensor that the memory is."""
    start = memory.address - int(memory.owner.data_ptr())
    return memory.owner[start : start + memory.size]
