"""A rank behind rank 0: does what each message asks, and passes it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter_ns

from engram_trt.runtime.distributed.mail import Inbox, Message, Outbox, Transport
from engram_trt.runtime.distributed.payload import copy_tensor
from engram_trt.runtime.distributed.routes import Layouts, Routes
from engram_trt.runtime.distributed.wire import Header, Layout, MessageBuffer, Op
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.execution import BoundChain, remembered
from engram_trt.runtime.local_chain import LocalChain
from engram_trt.runtime.stage_runners.contract import View


@dataclass(slots=True, kw_only=True)
class _OpenChain:
    """A session of rank 0 as this rank sees it."""

    chain: LocalChain
    limits: Mapping[str, int]
    bound: dict[tuple[int, ...], BoundChain] = field(default_factory=dict)


class Worker:
    """Serves one range of stages.

    Args:
        engine: the range.
        routes: of the whole chain.
        rank: this rank's number.
        transport: to its neighbours.
        failed: is told why receiving ended before its time.
        publish: receives this rank's recorded spans as text.
    """

    def __init__(
        self,
        engine: Engine,
        routes: Routes,
        rank: int,
        transport: Transport,
        failed: Callable[[Exception], None],
        publish: Callable[[str], None],
    ) -> None:
        self.engine, self.routes, self.rank = engine, routes, rank
        symbols = sorted(engine.symbol_limits)
        self._arriving, self._leaving = Layouts(routes, rank - 1, symbols), Layouts(routes, rank, symbols)
        self._outbox = Outbox(transport)
        self._queue: SimpleQueue[Message | BaseException] = SimpleQueue()
        self._inbox = Inbox(transport, Layouts(routes, rank - 1, symbols), self._queue.put, failed)
        self._publish = publish
        self._chains: dict[int, _OpenChain] = {}

    def stop(self, error: BaseException) -> None:
        """End `serve` with an error, as soon as the step it is in is done. For other threads."""
        self._queue.put(error)

    def serve(self) -> None:
        """Answer messages until rank 0 ends the chain; raises what `stop` was given."""
        self._inbox.start()
        while True:
            started = perf_counter_ns()
            message = self._queue.get()
            if isinstance(message, BaseException):
                raise message
            header = message.header
            if header.op is Op.STEP:
                self._note("idle", started)
            self._arriving.of(header), self._leaving.of(header)
            if header.op is Op.STEP:
                self._step(message)
            elif header.op is Op.SAVE:
                self._save(message)
            elif header.op is Op.LOAD:
                self._load(message)
            else:
                message.give_back()
                self._control(header)
            if header.op is Op.END:
                self._outbox.flush()
                self._inbox.join()
                return

    def _control(self, header: Header) -> None:
        if header.op is Op.OPEN:
            limits = self._arriving.sizes(header)
            self._chains[header.chain] = _OpenChain(chain=LocalChain(self.engine, limits), limits=limits)
        elif header.op is Op.CLOSE:
            del self._chains[header.chain]
        elif header.op is Op.RECORD:
            timeline = self.engine.timeline
            timeline.is_on = bool(header.numbers[0])
            if timeline.is_on:
                timeline.spans.clear()
            else:
                self._publish(timeline.to_json())
        self._outbox.send(header)
        if header.op is Op.CLOSE:
            self._outbox.forget(header.chain)

    def _step(self, message: Message) -> None:
        header, opened = message.header, self._chains[message.header.chain]
        sizes = self._arriving.sizes(header)
        bound = remembered(opened.bound, header.numbers, lambda: opened.chain.bind(sizes))
        started = perf_counter_ns()
        # What this rank only passes on is read straight from the message, which stays until it was packed.
        arrived = self.routes.step_layout(self.rank - 1, sizes).views(message.payload)
        for key, view in bound.inputs.items():
            copy_tensor(arrived[key], view)
        self._note("take", started)
        bound.run({})
        started = perf_counter_ns()
        self._pass_on(message, self.routes.step_layout(self.rank, sizes), {**arrived, **bound.outputs})
        self._note("send", started)

    def _save(self, message: Message) -> None:
        """Add this rank's caches of a row to those of the ranks before."""
        row, num_tokens = message.header.numbers
        opened = self._chains[message.header.chain]
        arrived = self._arriving.of(message.header).views(message.payload)
        saved = opened.chain.save_row(row, num_tokens)
        own = {key: MessageBuffer.holding(opened.chain.dtype(key), values) for key, values in saved.items()}
        self._pass_on(message, self._leaving.of(message.header), {**arrived, **own})

    def _load(self, message: Message) -> None:
        """Take this rank's caches of a row, pass on those of the ranks behind."""
        row, num_tokens = message.header.numbers
        arrived = self._arriving.of(message.header).views(message.payload)
        leaving = self._leaving.of(message.header)
        own = arrived.keys() - {item.key for item in leaving.items}
        chain = self._chains[message.header.chain].chain
        chain.load_row(row, num_tokens, {key: arrived[key].read() for key in own})
        self._pass_on(message, leaving, arrived)

    def _pass_on(self, message: Message, layout: Layout, sources: Mapping[str, View]) -> None:
        payload = self._outbox.memory(message.header.chain, layout.num_bytes)
        layout.pack(sources, payload)
        message.give_back()
        header = replace(message.header, layout=layout.digest, num_bytes=layout.num_bytes)
        self._outbox.send(header, payload)

    def _note(self, name: str, started: int) -> None:
        if self.engine.timeline.is_on:
            self.engine.timeline.add(name, "", started, perf_counter_ns())
