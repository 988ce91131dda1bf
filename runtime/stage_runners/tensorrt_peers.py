"""Tensors from one GPU to another: on streams of their own, ordered by events, without the host.

The stream of the source marks when the tensor is ready; a copy stream of the target waits for that mark, copies, and
marks the end; the target's own stream waits for the second mark. So a copy runs beside the work of other sequences
on both devices, and the host only enqueues.
"""

from __future__ import annotations

import logging
from typing import Any

from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.contract import Run
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer

LOG = logging.getLogger("engram_trt.tensorrt")


class PeerCopies:
    """Copies into one device.

    Args:
        driver: of the target.
        stream: on which the target runs its stages.
    """

    def __init__(self, driver: CudaDriver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._copy_stream: int | None = None
        self._reached: dict[int, bool] = {}
        self._events: list[tuple[CudaDriver, Any]] = []

    def bind(self, source: DeviceBuffer, target: DeviceBuffer, num_bytes: int) -> Run:
        """What enqueues one copy of the first bytes of a buffer of another device."""
        peer, driver = source.driver, self._driver
        self._reach(peer)
        if self._copy_stream is None:
            self._copy_stream = driver.create_stream()
        copy_stream = self._copy_stream
        ready, copied = peer.create_event(), driver.create_event()
        self._events += [(peer, ready), (driver, copied)]

        def run() -> None:
            peer.record_event(ready, source.stream)
            driver.wait_event(ready, copy_stream)
            driver.copy_from(peer, target.address, source.address, num_bytes, copy_stream)
            driver.record_event(copied, copy_stream)
            driver.wait_event(copied, self._stream)

        return run

    def _reach(self, peer: CudaDriver) -> None:
        if peer.ordinal in self._reached:
            return
        self._reached[peer.ordinal] = self._driver.reach(peer)
        if not self._reached[peer.ordinal]:
            LOG.warning(
                "cuda:%d cannot read cuda:%d: tensors between them go through the host",
                self._driver.ordinal,
                peer.ordinal,
            )

    def close(self) -> None:
        """Give stream and events back; nothing may be under way."""
        for driver, event in self._events:
            driver.destroy_event(event)
        self._events.clear()
        if self._copy_stream is not None:
            self._driver.destroy_stream(self._copy_stream)
            self._copy_stream = None
