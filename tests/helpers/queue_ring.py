"""Ranks as threads of one process, with queues in place of a network: everything of a distributed chain but that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from engram_trt.runtime.artifact import Artifact, open_backend
from engram_trt.runtime.distributed.chain import Ring, RingChain
from engram_trt.runtime.distributed.mail import Transport
from engram_trt.runtime.distributed.routes import Routes
from engram_trt.runtime.distributed.worker import Worker
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.placement import PlacedStages


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


def raise_it(error: Exception) -> None:
    raise error


@contextmanager
def ring_engine(artifact: Artifact, placed: tuple[PlacedStages, ...], backend: str = "onnxruntime") -> Iterator[Engine]:
    """Rank 0's engine of a chain whose other ranks are threads."""
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in placed]
    routes, deployment = Routes(placed), artifact.manifest.deployment
    engines, spans = [], list[str]()
    for range_ in placed:
        opened = open_backend(backend, artifact)
        layers = {stage.layer_id for stage in range_.stages if stage.layer_id is not None}
        store = artifact.engram_store(opened, deployment.engram, layers)
        part = replace(range_, device="cpu")
        engines.append(Engine.load_placed(artifact.config, deployment, (part,), {"cpu": opened}, store))
    threads = []
    for rank in range(1, len(placed)):
        transport = QueueTransport(queues[rank], queues[rank - 1])
        worker = Worker(engines[rank], routes, rank, transport, raise_it, spans.append)
        threads.append(threading.Thread(target=worker.serve, daemon=True))
        threads[-1].start()
    ring = Ring(routes, tuple(sorted(engines[0].symbol_limits)), QueueTransport(queues[0], queues[-1]), raise_it)
    yield replace(engines[0], open_chain=lambda engine, sizes: RingChain(engine, sizes, ring))
    ring.end()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    for engine in engines:
        engine.__exit__()


def arrays_equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, NaN included."""
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
