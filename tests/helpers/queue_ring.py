"""Ranks as threads of one process, with queues in place of a network: everything of a distributed chain but that."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from engram_trt.runtime.distributed.chain import Ring, RingChain
from engram_trt.runtime.distributed.mail import Transport
from engram_trt.runtime.distributed.payload import DeviceBytes, Payload
from engram_trt.runtime.distributed.routes import Routes
from engram_trt.runtime.distributed.worker import Worker
from engram_trt.runtime.engine import Engine, EnginePart
from engram_trt.runtime.placement import PlacedStages, pieces_of
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend
from engram_trt.runtime.timeline import Timeline


class QueueTransport(Transport):
    """Copies arrays into a queue, and out of another."""

    def __init__(self, outgoing: SimpleQueue[Any], incoming: SimpleQueue[Any]) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, header: Any, payload: Any) -> Callable[[], None]:
        for array in (header, payload):
            if array.size:
                self.outgoing.put(array.copy())
        return lambda: None

    def receive(self, target: Any) -> None:
        array = self.incoming.get()
        assert (array.dtype, array.shape) == (target.dtype, target.shape)
        target[:] = array


class DeviceQueueTransport(QueueTransport):
    """The same between GPUs of a recorded driver, whose memory is the host's: payloads are never host arrays.

    Args:
        outgoing, incoming: queues.
        backend: of the GPU.
    """

    def __init__(self, outgoing: SimpleQueue[Any], incoming: SimpleQueue[Any], backend: DeviceBackend) -> None:
        super().__init__(outgoing, incoming)
        self.backend = backend

    def memory(self, num_bytes: int) -> Payload:
        owner = np.full(max(num_bytes, 1), 0xA5, dtype=np.uint8)
        return DeviceBytes(owner.ctypes.data, num_bytes, self.backend.driver, self.backend.stream, owner)

    def send(self, header: Any, payload: Any) -> Callable[[], None]:
        self.outgoing.put(header.copy())
        if payload.size:
            payload.settle()
            self.outgoing.put(np.frombuffer(ctypes.string_at(payload.address, payload.size), dtype=np.uint8))
        return lambda: None

    def receive(self, target: Any) -> None:
        if not isinstance(target, DeviceBytes):
            super().receive(target)
            return
        array = self.incoming.get()
        assert array.size == target.size
        ctypes.memmove(target.address, array.ctypes.data, target.size)


def raise_it(error: Exception) -> None:
    raise error


@contextmanager
def ring_engine(
    whole: Engine,
    placed: Sequence[PlacedStages],
    spans: list[str] | None = None,
    workers: list[Worker] | None = None,
    rings: list[Ring] | None = None,
    transport_of: Callable[[SimpleQueue[Any], SimpleQueue[Any]], Transport] = QueueTransport,
) -> Iterator[Engine]:
    """Rank 0's engine of a chain whose other ranks are threads.

    Args:
        whole: gives every rank its loaded stages; stays open.
        placed: the stages of each rank.
        spans: receives what the other ranks publish.
        workers: receives the other ranks.
        rings: receives rank 0's end.
        transport_of: outgoing and incoming queue -> a rank's transport.
    """
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in placed]
    routes, runners = Routes(placed), {runner.spec.name: runner for runner in whole.runners}
    engines = []
    for number, range_ in enumerate(placed):
        own = tuple(runners[stage.name] for stage in range_.stages)
        part = EnginePart(device="cpu", backend=whole.backend, runners=own)
        engines.append(replace(whole, stages=range_.stages, parts=(part,), timeline=Timeline(number)))
    threads = []
    for rank in range(1, len(placed)):
        transport = transport_of(queues[rank], queues[rank - 1])
        publish = raise_it if spans is None else spans.append
        worker = Worker(engines[rank], routes, rank, transport, raise_it, publish)  # type: ignore[arg-type]
        if workers is not None:
            workers.append(worker)
        threads.append(threading.Thread(target=_serve_on_one_core, args=(worker,), daemon=True))
        threads[-1].start()
    ring = Ring(routes, tuple(sorted(whole.symbol_limits)), transport_of(queues[0], queues[-1]), raise_it)
    first = replace(engines[0], open_chain=lambda engine, sizes: RingChain(engine, sizes, ring))
    if spans is not None:
        ring.record(is_on=True)
    if rings is not None:
        rings.append(ring)
    yield first
    if ring.error is not None:
        return
    if spans is not None:
        ring.record(is_on=False)
    ring.end()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def placements(whole: Engine, max_ranks: int) -> list[tuple[PlacedStages, ...]]:
    """Every way to spread a chain's pieces over 1..max_ranks ranks."""
    pieces = pieces_of(whole.stages, whole.config)
    found = []
    for ranks in range(1, max_ranks + 1):
        for cuts in combinations(range(1, len(pieces)), ranks - 1):
            ends = [0, *cuts, len(pieces)]
            groups = [pieces[start:stop] for start, stop in pairwise(ends)]
            found.append(
                tuple(
                    PlacedStages(device=f"cpu:{number}", stages=tuple(stage for piece in group for stage in piece))
                    for number, group in enumerate(groups)
                )
            )
    return found


def arrays_equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, NaN included."""
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def _serve_on_one_core(worker: Worker) -> None:
    """A process of its own would count its own threads; here every thread must be told, or sums change their order."""
    torch.set_num_threads(1)
    worker.serve()
