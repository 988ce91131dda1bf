"""Messages: what is packed comes out bit for bit; what is not expected is refused."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from queue_ring import QueueTransport

from engram_trt.configs.errors import ClusterError
from engram_trt.runtime.distributed.mail import Inbox, Message, Outbox
from engram_trt.runtime.distributed.routes import Layouts, Routes
from engram_trt.runtime.distributed.wire import HEADER_SLOTS, Header, Item, Layout, MessageBuffer, Op
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.stage_runners.contract import Array, View

ITEMS = [
    Item(key="streams", dtype="float32", shape=(2, 3)),
    Item(key="mask", dtype="bool", shape=(5,)),
    Item(key="half", dtype="bfloat16", shape=(3, 1)),
    Item(key="ids", dtype="int64", shape=(1, 1, 2)),
    Item(key="lists", dtype="int32", shape=(7,)),
]


def values() -> dict[str, Array]:
    return {
        "streams": np.array([[0.1, -0.0, np.inf], [1e-40, -2.5, 3.0]], dtype=np.float32),
        "mask": np.array([True, False, True, True, False]),
        "half": np.array([[1.5], [-0.0], [2.0**-126]], dtype=np.float32),
        "ids": np.array([[[2**53 + 1, -1]]], dtype=np.int64),
        "lists": np.arange(7, dtype=np.int32),
    }


def views() -> dict[str, View]:
    return {item.key: MessageBuffer.holding(item.dtype, values()[item.key]) for item in ITEMS}


def test_tensors_come_out_as_they_went_in() -> None:
    layout = Layout(ITEMS)
    memory = np.full(layout.num_bytes, 255, dtype=np.uint8)
    layout.pack(views(), memory)
    for key, view in layout.views(memory).items():
        assert view.read().tobytes() == values()[key].tobytes(), key
        assert view.read().dtype == values()[key].dtype
    assert layout.num_bytes >= sum(item.num_bytes for item in ITEMS)


@pytest.mark.parametrize(
    "other",
    [
        ITEMS[:-1],
        [ITEMS[1], ITEMS[0], *ITEMS[2:]],
        [replace(ITEMS[0], shape=(3, 2)), *ITEMS[1:]],
        [*ITEMS[:-1], replace(ITEMS[-1], dtype="float32")],
        [replace(ITEMS[0], key="other"), *ITEMS[1:]],
    ],
)
def test_another_layout_is_refused(other: list[Item]) -> None:
    sent, expected = Layout(other), Layout(ITEMS)
    header = Header(op=Op.STEP, sequence=0, layout=sent.digest, num_bytes=sent.num_bytes)
    with pytest.raises(ClusterError, match="another layout"):
        header.require(expected)
    Header(op=Op.STEP, sequence=0, layout=expected.digest, num_bytes=expected.num_bytes).require(expected)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("streams", np.zeros((3, 2), np.float32)), ("lists", np.zeros(7, np.float32)), ("mask", np.zeros(5, np.int8))],
)
def test_a_tensor_of_another_kind_is_not_packed(key: str, wrong: Array) -> None:
    layout = Layout(ITEMS)
    sources = {**views(), key: MessageBuffer.holding(str(wrong.dtype), wrong)}
    with pytest.raises(ValueError, match=key if wrong.dtype != np.float32 or key == "lists" else "writing"):
        layout.pack(sources, np.zeros(layout.num_bytes, dtype=np.uint8))


def test_headers_come_back() -> None:
    header = Header(op=Op.SAVE, sequence=7, chain=3, layout=2**62, num_bytes=2**40, numbers=(1, 2, -3))
    assert Header.from_array(header.to_array()) == header


@pytest.mark.parametrize(("slot", "value"), [(0, 1), (1, 99), (2, 0), (2, 77), (7, -1), (7, 17)])
def test_what_is_no_header_is_refused(slot: int, value: int) -> None:
    array = Header(op=Op.END, sequence=0).to_array()
    array[slot] = value
    with pytest.raises(ClusterError, match="header"):
        Header.from_array(array)


class Mail:
    """An inbox that listens to an outbox."""

    def __init__(self) -> None:
        queue: SimpleQueue[Any] = SimpleQueue()
        self.transport = QueueTransport(queue, queue)
        self.arrived: SimpleQueue[Message | Exception] = SimpleQueue()
        layouts = Layouts(Routes([PlacedStages(device="cpu", stages=())] * 2), 0, ("batch",))
        self.outbox = Outbox(self.transport)
        self.inbox = Inbox(self.transport, layouts, self.arrived.put, self.arrived.put)
        self.inbox.start()

    def next(self) -> Message | Exception:
        return self.arrived.get(timeout=10)


EMPTY = Layout([])


def header(op: Op, sequence: int, chain: int = 0, numbers: tuple[int, ...] = ()) -> Header:
    return Header(op=op, sequence=sequence, chain=chain, layout=EMPTY.digest, numbers=numbers)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (header(Op.END, 1), "message 1"),
        (header(Op.STEP, 0, 5, (1,)), "session 5"),
        (header(Op.OPEN, 0, 1, (1, 2)), "2 sizes"),
        (replace(header(Op.END, 0), num_bytes=64), "another layout"),
    ],
)
def test_a_message_out_of_order_ends_the_receiving(wrong: Header, message: str) -> None:
    mail = Mail()
    mail.outbox.send(wrong)
    error = mail.next()
    assert isinstance(error, ClusterError)
    assert message in str(error)


@pytest.mark.parametrize("size", [0, 3])
def test_a_step_beyond_the_limits_is_refused(size: int) -> None:
    mail = Mail()
    mail.outbox.send(header(Op.OPEN, 0, 1, (2,)))
    opened = mail.next()
    assert isinstance(opened, Message)
    opened.give_back()
    mail.outbox.send(header(Op.STEP, 1, 1, (size,)))
    error = mail.next()
    assert isinstance(error, ClusterError)
    assert f"batch = {size}; expected 1..2" in str(error)


def test_the_next_message_of_a_session_waits_for_the_memory_of_the_last() -> None:
    mail = Mail()
    mail.outbox.send(header(Op.OPEN, 0, 1, (2,)))
    first = mail.next()
    assert isinstance(first, Message)
    mail.outbox.send(header(Op.STEP, 1, 1, (2,)))
    mail.inbox._thread.join(0.2)
    assert mail.arrived.empty()
    first.give_back()
    second = mail.next()
    assert isinstance(second, Message)
    assert second.header.op is Op.STEP


def test_a_header_has_room_for_every_size() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        Header(op=Op.STEP, sequence=0, numbers=(1,) * HEADER_SLOTS).to_array()
