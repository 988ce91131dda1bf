"""Sending to the next rank and receiving from the one before, beside the work of the rank."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engram_trt.runtime.distributed.payload import Payload, settle
from engram_trt.runtime.distributed.routes import Layouts
from engram_trt.runtime.distributed.wire import HEADER_SLOTS, Header, Integers, Op, refused

Deliver = Callable[["Message"], None]


class Transport(ABC):
    """Ordered delivery of arrays to the next rank, from the one before."""

    def memory(self, num_bytes: int) -> Payload:
        """Memory for the payload of messages, where this transport takes it from and puts it."""
        return np.empty(num_bytes, dtype=np.uint8)

    @abstractmethod
    def send(self, header: Integers, payload: Payload) -> Callable[[], None]:
        """Begin to send the header, and the payload unless it is empty; both arrays stay as they are until the
        returned function has come back."""

    @abstractmethod
    def receive(self, target: Integers | Payload) -> None:
        """Wait for the next array, of exactly this size."""


class Slot:
    """Memory of one session's incoming messages: one at a time, given back before the next is taken.

    Args:
        num_bytes: of the largest step.
        allocate: gives memory of so many bytes.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], Payload]) -> None:
        self._allocate = allocate
        self.memory = allocate(num_bytes)
        self._is_free = threading.Semaphore(1)

    def take(self, num_bytes: int) -> Payload:
        """Wait until the memory is free; it grows for what is longer than a step."""
        self._is_free.acquire()
        if num_bytes > self.memory.size:
            self.memory = self._allocate(num_bytes)
        return self.memory[:num_bytes]

    def give_back(self) -> None:
        """The message was read."""
        settle(self.memory)
        self._is_free.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message that was received; to be given back once it is read."""

    header: Header
    payload: Payload
    slot: Slot

    def give_back(self) -> None:
        self.slot.give_back()


class Outbox:
    """Sends to the next rank without waiting for it.

    Args:
        transport: where to.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._memory: dict[int, Payload] = {}
        self._waiting: dict[int, tuple[Callable[[], None], Integers]] = {}

    def memory(self, chain: int, num_bytes: int) -> Payload:
        """Where a session's next message is to be packed; waits until its last one has left."""
        waiting = self._waiting.pop(chain, None)
        if waiting is not None:
            waiting[0]()
        if chain not in self._memory or self._memory[chain].size < num_bytes:
            self._memory[chain] = self._transport.memory(num_bytes)
        return self._memory[chain][:num_bytes]

    def send(self, header: Header, payload: Payload | None = None) -> None:
        """Begin to send; the payload is the one from `memory`."""
        array = header.to_array()
        body = self.memory(header.chain, 0) if payload is None else payload
        with self._lock:
            self._waiting[header.chain] = self._transport.send(array, body), array

    def forget(self, chain: int) -> None:
        """Give a session's memory back."""
        self.memory(chain, 0)
        del self._memory[chain]

    def flush(self) -> None:
        """Wait until everything has left."""
        for wait, _ in self._waiting.values():
            wait()
        self._waiting.clear()


class Inbox:
    """A thread that receives from the rank before, so that messages arrive while stages run.

    Args:
        transport: where from.
        layouts: what the payload of a header must be.
        deliver: is given every message, in order.
        failed: is told why receiving ended before its time.
    """

    def __init__(
        self, transport: Transport, layouts: Layouts, deliver: Deliver, failed: Callable[[Exception], None]
    ) -> None:
        self._transport, self._layouts, self._deliver, self._failed = transport, layouts, deliver, failed
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self._thread = threading.Thread(target=self._receive_all, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the chain."""
        self._thread.join()

    def _receive_all(self) -> None:
        try:
            while self._receive_one() != Op.END:
                pass
        except Exception as error:  # noqa: BLE001 - whatever the transport raises ends the session, by name
            self._failed(error)

    def _receive_one(self) -> Op:
        array = np.zeros(HEADER_SLOTS, dtype=np.int64)
        self._transport.receive(array)
        header = Header.from_array(array)
        if header.sequence != self._next:
            raise refused(f"message {header.sequence}", f"message {self._next}")
        self._next += 1
        layout = self._layouts.of(header)
        header.require(layout)
        if header.op is Op.OPEN or header.chain not in self._slots:
            self._slots[header.chain] = Slot(self._layouts.capacity(header), self._transport.memory)
        slot = self._slots[header.chain]
        payload = slot.take(layout.num_bytes)
        if layout.num_bytes:
            self._transport.receive(payload)
        if header.op is Op.CLOSE:
            del self._slots[header.chain]
        self._deliver(Message(header=header, payload=payload, slot=slot))
        return header.op
