"""A chain over two GPUs of one process, on a recorded driver: what runs where, what crosses, in which order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_recorder import CUresult, RecordedDriver
from tensorrt_world import World

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.plugins.trt_kernels import KernelLibrary
from engram_trt.plugins.trt_launch import KernelLauncher
from engram_trt.runtime.cuda_driver import CudaDriver, CudaError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer

SPLIT = 6


def two_gpus(world: World) -> Engine:
    world.recorder.num_devices = 2
    document = {
        **world.artifact.manifest.deployment.to_dict(),
        "devices": ["cuda:0", "cuda:1"],
        "stages": [{"device": "cuda:0", "layers": [0, SPLIT - 1]}, {"device": "cuda:1", "layers": [SPLIT, 11]}],
    }
    deployment = DeploymentConfig.from_dict(document)
    placed = world.artifact.place(deployment)
    backends = {f"cuda:{number}": world.backend(number) for number in (0, 1)}
    return Engine.load_placed(world.artifact.config, deployment, placed, backends)


def calls_of(recorder: RecordedDriver, *names: str) -> list[tuple[str, int, tuple[object, ...]]]:
    pairs = zip(recorder.calls, recorder.devices_of, strict=True)
    return [(name, device, arguments) for (name, arguments), device in pairs if name in names]


def test_every_stage_runs_on_its_own_gpu_and_stream(world: World) -> None:
    with two_gpus(world) as engine:
        session = Session(engine)
        world.recorder.calls.clear(), world.recorder.devices_of.clear()
        session.step({session.add(): [1, 2, 3]})
        launches = calls_of(world.recorder, "cuLaunchKernel")
    kinds = [spec.kind for spec in world.artifact.stages]
    assert [arguments[0] for _, _, arguments in launches] == kinds
    first = 2 + SPLIT
    assert [device for _, device, _ in launches] == [0] * first + [1] * (len(kinds) - first)
    streams = [arguments[8] for _, _, arguments in launches]
    assert len(set(streams[:first])) == len(set(streams[first:])) == 1
    assert streams[0] != streams[-1]
    assert world.recorder.unguarded == []


def test_what_crosses_goes_from_gpu_to_gpu_between_two_events(world: World) -> None:
    with two_gpus(world) as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2, 3]})
        world.recorder.calls.clear(), world.recorder.devices_of.clear()
        session.step({row: [4, 5, 6]})
        recorder = world.recorder
        names = [name for name, _ in recorder.calls]
        copies = recorder.of("cuMemcpyPeerAsync")
        keys = {key for key in session.chain.bind(dict(engine.symbol_limits)).inputs}
        last = len(names) - 1 - names[::-1].index("cuLaunchKernel")
        between = names[names.index("cuLaunchKernel") : last]
        assert {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamSynchronize"} & set(between) == set()
        events = calls_of(recorder, "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyPeerAsync")
        launches = calls_of(recorder, "cuLaunchKernel")
        source_stream, target_stream = launches[0][2][8], launches[-1][2][8]
    assert "hidden_states" not in keys  # made on the first GPU
    # streams, reading mix, start positions, image mask, two rotary tables
    assert len(copies) == 6
    assert {(copy[1], copy[3]) for copy in copies} == {("context 1", "context 0")}
    for position in range(0, len(events), 5):
        ready, wait, copy, copied, release = events[position : position + 5]
        assert [entry[0] for entry in (ready, wait, copy, copied, release)] == [
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuMemcpyPeerAsync",
            "cuEventRecord",
            "cuStreamWaitEvent",
        ]
        assert [entry[1] for entry in (ready, wait, copy, copied, release)] == [0, 1, 1, 1, 1]
        copy_stream = copy[2][5]
        assert copy_stream not in (source_stream, target_stream)
        assert ready[2] == (wait[2][1], source_stream)
        assert wait[2][0] == copied[2][1] == copy_stream
        assert release[2][:2] == (target_stream, copied[2][0])
        assert ready[2][0] != copied[2][0]


def test_the_bytes_arrive(world: World) -> None:
    """Positions and masks that the session wrote on the first GPU reach the second."""
    with two_gpus(world) as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2, 3]})
        session.step({row: [4]})
        views = session._prepare({row: [5]}, "last")[1].views
        session.step({row: [5]})
        assert views["head"]["hidden_states"].buffer is not views["embedding"]["hidden_states"].buffer
        starts = [views[name]["start_positions"] for name in ("block_00", f"block_{SPLIT:02d}")]
        assert starts[0].buffer is not starts[1].buffer
        assert [int(view.read()[0]) for view in starts] == [4, 4]


def test_peers_are_enabled_once_and_a_detour_is_said(world: World, tensorrt_log: list[str]) -> None:
    with two_gpus(world) as engine:
        Session(engine).chain.bind(dict(engine.symbol_limits))
        Session(engine).chain.bind(dict(engine.symbol_limits))
    assert len(world.recorder.of("cuCtxEnablePeerAccess")) == 1
    assert tensorrt_log == []
    assert world.recorder.names().count("cuEventDestroy") == world.recorder.names().count("cuEventCreate") > 0
    assert world.recorder.names().count("cuStreamDestroy") == world.recorder.names().count("cuStreamCreate") == 3


def test_without_a_way_the_driver_goes_through_the_host_and_it_is_said(
    world: World,
    tensorrt_log: list[str],
) -> None:
    world.recorder.peers_reach = False
    with two_gpus(world) as engine:
        Session(engine).chain.bind(dict(engine.symbol_limits))
    assert tensorrt_log == ["cuda:1 cannot read cuda:0: tensors between them go through the host"]
    assert "cuCtxEnablePeerAccess" not in world.recorder.names()


def test_access_that_another_engine_enabled_is_no_error() -> None:
    recorder = RecordedDriver(num_devices=2)
    first, second = CudaDriver(recorder, 0), CudaDriver(recorder, 1)
    recorder.failures["cuCtxEnablePeerAccess"] = CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    assert second.reach(first)
    recorder.failures["cuCtxEnablePeerAccess"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        second.reach(first)


def test_copies_are_of_the_bytes_in_use() -> None:
    recorder = RecordedDriver(num_devices=2)
    drivers = [CudaDriver(recorder, number) for number in (0, 1)]
    source, target = (DeviceBuffer(driver, driver.create_stream(), "float32", 8, "a test") for driver in drivers)
    source.write(np.arange(8, dtype=np.float32)), target.write(np.zeros(8, dtype=np.float32))
    drivers[1].copy_from(drivers[0], target.address, source.address, 12, target.stream)
    assert target.read((8,)).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_plugins_launch_on_the_gpu_that_is_current(tmp_path: Path) -> None:
    """Loaded code belongs to one device; TensorRT calls a plugin with its engine's device current."""
    recorder = RecordedDriver(num_devices=2)
    drivers = [CudaDriver(recorder, number) for number in (0, 1)]
    launchers = [KernelLauncher(KernelLibrary(tmp_path, ()), driver, 90) for driver in drivers]
    ran: list[int] = []
    for number, launcher in enumerate(launchers):
        launcher._plan = lambda call, number=number: ran.append(number) or _stop()  # type: ignore[assignment,method-assign]
    launchers[0].adopt(launchers[1])
    for number, driver in enumerate(drivers):
        with driver.guard(), pytest.raises(StopIteration):
            launchers[0].run(None)  # type: ignore[arg-type]
        assert ran == list(range(number + 1))


def _stop() -> None:
    raise StopIteration
