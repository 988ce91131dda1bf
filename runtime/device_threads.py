"""Threads that stand for devices: `cpu:N` is a runner pinned to core N."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from engram_trt.configs.errors import DeploymentError

Result = TypeVar("Result")


class WorkThread:
    """One thread that runs what it is given, in order.

    Args:
        name: of the thread.
        core: where it runs; None for anywhere.
    """

    def __init__(self, name: str, core: int | None = None) -> None:
        # Affinity is a property of the calling thread, and of every thread it starts.
        cores = os.sched_getaffinity(0) if core is None else {core}
        self._pool = ThreadPoolExecutor(1, name, initializer=os.sched_setaffinity, initargs=(0, cores))

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Run a task after those submitted before; what it raises is in the future only."""
        return self._pool.submit(task)

    def close(self) -> None:
        """Let what was submitted end, then end the thread."""
        self._pool.shutdown(wait=True)


class DeviceThread(WorkThread):
    """A thread on one core.

    Args:
        device: `cpu:N`.

    Raises:
        DeploymentError: there is no core N for this process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(device, require_core(device))


def core_of(device: str) -> int | None:
    """N of `cpu:N`; None for a device without a core of its own."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cpu" and number else None


def require_core(device: str) -> int:
    """The core of `cpu:N`; DeploymentError where this process may not run on it."""
    core = core_of(device)
    allowed = os.sched_getaffinity(0)
    if core is None or core not in allowed:
        raise DeploymentError(
            "devices",
            found=repr(device),
            expected="cpu:N with N out of " + ", ".join(map(str, sorted(allowed))),
            remedy="Name cores of this machine that the process may use.",
        )
    return core
