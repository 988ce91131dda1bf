"""The chain as rank 0 sees it: its own stages, then a message around the other ranks, then the results."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from engram_trt.runtime.distributed.mail import Inbox, Message, Outbox, Transport
from engram_trt.runtime.distributed.payload import Bytes, Payload
from engram_trt.runtime.distributed.routes import Layouts, Routes
from engram_trt.runtime.distributed.wire import Header, Layout, MessageBuffer, Op
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram.staging import EngramStaging
from engram_trt.runtime.execution import BoundChain, SessionChain
from engram_trt.runtime.local_chain import LocalChain
from engram_trt.runtime.stage_runners.contract import Array, View
from engram_trt.runtime.state import SessionBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A message that has not come back."""

    chain: int
    answer: Future[Message]


class Ring:
    """Rank 0's end: numbers messages, sends them off, and tells who waits when they are back.

    Args:
        routes: of the whole chain.
        symbols: names of the sizes.
        transport: to rank 1, from the last rank.
        failed: is told why receiving ended before its time.
    """

    def __init__(
        self, routes: Routes, symbols: tuple[str, ...], transport: Transport, failed: Callable[[Exception], None]
    ) -> None:
        self.routes, self.symbols = routes, symbols
        self._outbox = Outbox(transport)
        self._lock = threading.RLock()
        self._pending: dict[int, _Pending] = {}
        self._released: list[int] = []
        self._num_messages = self._num_chains = 0
        self.error: BaseException | None = None
        """What ended the chain before its time."""
        arriving = Layouts(routes, routes.world_size - 1, symbols)
        self._inbox = Inbox(transport, arriving, self._arrived, failed)
        self._inbox.start()

    def open(self, limits: Mapping[str, int]) -> int:
        """Open a session in every rank; its number."""
        with self._lock:
            self._num_chains += 1
            self.post(Op.OPEN, self._num_chains, tuple(limits[symbol] for symbol in self.symbols))
            return self._num_chains

    def release(self, chain: int) -> None:
        """Close a session with the next message. Sends nothing, so that a finalizer may call it."""
        self._released.append(chain)

    def memory(self, chain: int, num_bytes: int) -> Payload:
        """See `Outbox.memory`. A message of this session that nobody waits for any more is dropped."""
        with self._lock:
            for sequence in [number for number, pending in self._pending.items() if pending.chain == chain]:
                pending = self._pending.pop(sequence)
                if pending.answer.done() and pending.answer.exception() is None:
                    pending.answer.result().give_back()
        return self._outbox.memory(chain, num_bytes)

    def post(
        self,
        op: Op,
        chain: int = 0,
        numbers: tuple[int, ...] = (),
        layout: Layout | None = None,
        payload: Payload | None = None,
        *,
        is_awaited: bool = False,
    ) -> Future[Message]:
        """Send a message; the future has it when it is back, and only if it is awaited."""
        with self._lock:
            if self.error is not None:
                raise self.error
            while self._released and op is not Op.CLOSE:
                closed = self._released.pop()
                self.post(Op.CLOSE, closed)
                self._outbox.forget(closed)
            sequence, answer = self._num_messages, Future[Message]()
            self._num_messages += 1
            if is_awaited:
                self._pending[sequence] = _Pending(chain=chain, answer=answer)
            layout = layout or Layout([])
            header = Header(
                op=op,
                sequence=sequence,
                chain=chain,
                layout=layout.digest,
                num_bytes=layout.num_bytes,
                numbers=numbers,
            )
            self._outbox.send(header, payload)
            return answer

    def collect(self, answer: Future[Message]) -> Message:
        """Wait for an answer."""
        message = answer.result()
        with self._lock:
            self._pending.pop(message.header.sequence, None)
        return message

    def fail(self, error: BaseException) -> None:
        """Let everyone who waits, now or later, have this error. For other threads."""
        with self._lock:
            self.error = error
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_exception(error)
            self._pending.clear()

    def record(self, *, is_on: bool) -> None:
        """Let every other rank begin to record spans, or end and publish them."""
        self.post(Op.RECORD, numbers=(int(is_on),))

    def end(self) -> None:
        """Ask all ranks to leave, and wait until they are about to."""
        self.post(Op.END)
        self._inbox.join()
        self._outbox.flush()

    def _arrived(self, message: Message) -> None:
        with self._lock:
            pending = self._pending.get(message.header.sequence)
            if pending is None:
                message.give_back()
            else:
                pending.answer.set_result(message)


class RingChain(SessionChain):
    """A session whose stages are spread over the ranks.

    Args:
        engine: rank 0's part.
        sizes: largest value of every symbol in this session.
        ring: to the other ranks.
    """

    def __init__(self, engine: Engine, sizes: Mapping[str, int], ring: Ring) -> None:
        self._ring, self._sizes, self._timeline = ring, dict(sizes), engine.timeline
        self._local = LocalChain(engine, sizes)
        self.engram: EngramStaging | None = self._local.engram
        self._number = ring.open(sizes)
        weakref.finalize(self, ring.release, self._number)
        last = ring.routes.world_size - 1
        self._results = self._host_memory(ring.routes.step_layout(last, sizes))
        self._inputs = self._host_memory(ring.routes.step_layout(0, sizes))

    @staticmethod
    def _host_memory(layout: Layout) -> dict[str, Bytes]:
        return {item.key: np.zeros(item.num_bytes, dtype=np.uint8) for item in layout.items}

    @property
    def buffers(self) -> SessionBuffers:
        return self._local.buffers

    def bind(self, sizes: Mapping[str, int]) -> BoundChain:
        local, ring, number = self._local.bind(sizes), self._ring, self._number
        leaving = ring.routes.step_layout(0, sizes)
        arriving = ring.routes.step_layout(ring.routes.world_size - 1, sizes)
        known = {**local.inputs, **local.outputs}
        foreign = {key: view for key, view in self._views(leaving, self._inputs).items() if key not in known}
        sources = {**foreign, **known}
        results = self._views(arriving, self._results)
        numbers = tuple(sizes[symbol] for symbol in ring.symbols)
        answers: list[Future[Message]] = []

        def send() -> None:
            answers.clear()
            payload = ring.memory(number, leaving.num_bytes)
            leaving.pack(sources, payload)
            answers.append(ring.post(Op.STEP, number, numbers, leaving, payload, is_awaited=True))

        def receive() -> None:
            message = ring.collect(answers.pop())
            for key, view in arriving.views(message.payload).items():
                results[key].write(view.read())
            message.give_back()

        return replace(
            local,
            runs=(*local.runs, ("send", send)),
            inputs={**local.inputs, **foreign},
            outputs={**local.outputs, **results},
            finish=(*local.finish, ("receive", receive)),
        )

    @staticmethod
    def _views(layout: Layout, memory: Mapping[str, Bytes]) -> dict[str, View]:
        return {
            item.key: MessageBuffer(item.dtype, memory[item.key][: item.num_bytes]).view(item.shape)
            for item in layout.items
        }

    def save_row(self, row: int, num_tokens: int) -> dict[str, Array]:
        ring = self._ring
        ring.memory(self._number, 0)
        message = ring.collect(ring.post(Op.SAVE, self._number, (row, num_tokens), is_awaited=True))
        layout = ring.routes.row_layout(range(1, ring.routes.world_size), num_tokens, self._sizes)
        remote = {key: view.read().copy() for key, view in layout.views(message.payload).items()}
        message.give_back()
        return {**self._local.save_row(row, num_tokens), **remote}

    def load_row(self, row: int, num_tokens: int, saved: Mapping[str, Array]) -> None:
        ring = self._ring
        layout = ring.routes.row_layout(range(1, ring.routes.world_size), num_tokens, self._sizes)
        shapes = {item.key: item.shape for item in layout.items}
        if any(key not in saved or saved[key].shape != shape for key, shape in shapes.items()):
            raise ValueError("the saved row is of a session with other caches or limits")
        self._local.load_row(row, num_tokens, {key: value for key, value in saved.items() if key not in shapes})
        payload = ring.memory(self._number, layout.num_bytes)
        for key, view in layout.views(payload).items():
            view.write(saved[key])
        answer = ring.post(Op.LOAD, self._number, (row, num_tokens), layout, payload, is_awaited=True)
        ring.collect(answer).give_back()
