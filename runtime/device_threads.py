"""Threads that stand for devices: `cpu:N` is a runner pinned to core N."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engram_trt.configs.errors import DeploymentError


class DeviceThread:
    """One thread on one core; runs what it is given, in order.

    Args:
        device: `cpu:N`.

    Raises:
        DeploymentError: there is no core N for this process.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        core = require_core(device)
        # Affinity is a property of the calling thread, and of every thread it starts.
        self._pool = ThreadPoolExecutor(1, device, initializer=os.sched_setaffinity, initargs=(0, {core}))

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task after those submitted before; it has to keep its own exceptions."""
        self._pool.submit(task)

    def close(self) -> None:
        """Let what was submitted end, then end the thread."""
        self._pool.shutdown(wait=True)


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
