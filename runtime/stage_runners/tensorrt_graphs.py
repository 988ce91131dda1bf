"""CUDA graphs of a stage's decode steps, one per set of shapes and addresses, and eager runs where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from engram_trt.configs.errors import BackendError
from engram_trt.runtime.cuda_driver import CudaDriver

LOG = logging.getLogger("engram_trt.tensorrt")

MAX_GRAPHS = 64
"""Graphs a stage keeps; a further one replaces the one unused longest."""


class StageGraphs:
    """Captured steps of one stage.

    Args:
        stage: for the log.
        driver: captures and launches.
        stream: that the stage runs on.
    """

    def __init__(self, stage: str, driver: CudaDriver, stream: int) -> None:
        self.stage, self.driver, self.stream = stage, driver, stream
        self.eager_reason: str | None = None
        """Why this stage runs without graphs; None while it has them."""
        self._executables: dict[Hashable, Any] = {}

    def replay(self, key: Hashable) -> bool:
        """Enqueue the captured step of these shapes and addresses; False if there is none."""
        executable = self._executables.pop(key, None)
        if executable is None:
            return False
        self._executables[key] = executable  # last in order: most recently used
        self.driver.launch_graph(executable, self.stream)
        return True

    def capture_and_run(
        self, key: Hashable, enqueue: Callable[[], None], stream_capturable: Callable[[], bool]
    ) -> None:
        """Capture a step and replay it, or run it eagerly where that is impossible and say why, once.

        TensorRT sets things up at the first enqueue after a change of shapes or addresses, which cannot be captured:
        call this for a step that was enqueued with the same bindings before.

        Args:
            key: shapes and addresses.
            enqueue: puts the stage's work on the stream.
            stream_capturable: whether TensorRT says that it can be captured.

        Raises:
            BackendError: what `enqueue` raises outside a capture.
        """
        if self.eager_reason is None:
            try:
                if not stream_capturable():
                    raise RuntimeError("TensorRT says that the engine cannot be captured")
                executable = self.driver.capture(self.stream, enqueue)
            except (BackendError, RuntimeError) as error:
                self.eager_reason = str(error)
                LOG.warning("%s runs without CUDA graphs: %s", self.stage, error)
        if self.eager_reason is not None:
            enqueue()
            return
        self._make_room()
        self._executables[key] = executable
        self.driver.launch_graph(executable, self.stream)

    def close(self) -> None:
        """Give all graphs back."""
        for executable in self._executables.values():
            self.driver.destroy_graph(executable)
        self._executables.clear()

    def _make_room(self) -> None:
        while len(self._executables) >= MAX_GRAPHS:
            oldest = self._executables.pop(next(iter(self._executables)))
            # Replays may still be under way.
            self.driver.synchronize(self.stream)
            self.driver.destroy_graph(oldest)
