"""Payloads that stay on GPUs, on a recorded driver: the bits of one process, and no tensor through the host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from cuda_recorder import RecordedDriver
from queue_ring import DeviceQueueTransport, placements, ring_engine

from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.distributed.mail import Slot
from engram_trt.runtime.distributed.payload import DeviceBytes, LentBuffer
from engram_trt.runtime.distributed.wire import Item, Layout, MessageBuffer
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend

LAYOUT = Layout([Item(key="a", dtype="bfloat16", shape=(3, 5)), Item(key="b", dtype="int64", shape=(2,))])


def story(engine: Engine) -> list[np.ndarray]:
    session = Session(engine)
    row = session.add()
    out = [session.prefill(row, list(range(3, 40)), "all"), *session.taps.values()]
    out += [session.step({row: [token]})[row] for token in (7, 8, 9)]
    session.rollback(row, 2)
    saved = session.snapshot(row)
    session.finish(row)
    again = session.restore(saved)
    return [*out, session.step({again: [11]})[again]]


def test_a_ring_of_gpus_gives_the_bits_of_one(tiny_artifact: Path, recorder: RecordedDriver) -> None:
    artifact = Artifact.open(tiny_artifact)
    with artifact.engine("onnxruntime_cuda") as engine:
        expected = story(engine)
        backend = engine.backend
        assert isinstance(backend, DeviceBackend)
        placed = placements(engine, 3)[-1]
        assert len(placed) == 3
        recorder.calls.clear()
        with ring_engine(engine, placed, transport_of=partial(DeviceQueueTransport, backend=backend)) as ring:
            found = story(ring)
        assert recorder.of("cuMemcpyPeerAsync")
    assert [one.tobytes() for one in found] == [other.tobytes() for other in expected]


def test_a_step_moves_streams_without_the_host(tiny_artifact: Path, recorder: RecordedDriver) -> None:
    artifact = Artifact.open(tiny_artifact)
    config = artifact.config
    with artifact.engine("onnxruntime_cuda") as engine:
        placed = placements(engine, 2)[-1]
        transport = partial(DeviceQueueTransport, backend=engine.backend)
        with ring_engine(engine, placed, transport_of=transport) as ring:
            session = Session(ring)
            row = session.add()
            session.step({row: list(range(3, 67))})
            recorder.calls.clear()
            session.step({row: list(range(3, 67))})
            streams = 64 * config.hc_mult * config.dim * 4
            copied = [arguments[4] for arguments in recorder.of("cuMemcpyPeerAsync")]
            through_host = [args[2] for args in (*recorder.of("cuMemcpyDtoHAsync"), *recorder.of("cuMemcpyHtoDAsync"))]
    assert copied.count(streams) == 2  # into the message, and out of it
    assert streams not in through_host


def memory(size: int) -> DeviceBytes:
    driver = CudaDriver(RecordedDriver())
    return DeviceBytes(driver.allocate(size, "a message"), size, driver, driver.create_stream(), None)


def test_a_layout_packs_host_tensors_into_device_memory_and_back() -> None:
    message = memory(LAYOUT.num_bytes)
    values = {"a": np.arange(15, dtype=np.float32).reshape(3, 5), "b": np.array([2**40, -1])}
    sources = {item.key: MessageBuffer.holding(item.dtype, values[item.key]) for item in LAYOUT.items}
    LAYOUT.pack(sources, message)
    views = LAYOUT.views(message)
    assert all(isinstance(view.buffer, LentBuffer) for view in views.values())
    for key, view in views.items():
        np.testing.assert_array_equal(view.read(), values[key])


def test_parts_of_device_memory_are_taken_as_of_an_array() -> None:
    whole = memory(100)
    part = whole[20:60][10:]
    assert (part.address, part.size) == (whole.address + 30, 30)
    assert whole[:0].size == 0


def test_memory_is_given_back_when_the_gpu_has_read_it() -> None:
    slot = Slot(64, memory)
    taken = slot.take(32)
    assert isinstance(taken, DeviceBytes)
    recorded = taken.driver.api
    recorded.calls.clear()
    slot.give_back()
    assert [arguments for name, arguments in recorded.calls if name == "cuStreamSynchronize"] == [(taken.stream,)]
    slot.take(200)
    assert slot.memory.size == 200
