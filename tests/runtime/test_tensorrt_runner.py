"""The TensorRT back end under a `Session`, on a recorded driver: what is bound, run, captured, copied and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cuda_recorder import CUresult, RecordedDriver
from fake_tensorrt import FakeContext, FakeEngine
from tensorrt_world import WEIGHT, World

from engram_trt.configs.errors import ArtifactError, BackendError, RequestError
from engram_trt.runtime.cuda_driver import CudaDriver, CudaError
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.device_buffers import DeviceBuffer, from_stored, to_stored
from engram_trt.runtime.stage_runners.tensorrt import TensorRTStageRunner
from engram_trt.runtime.stage_runners.tensorrt_engines import open_engine
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    EnginesManifest,
    PlanRecord,
)


def contexts(engine: Engine) -> list[FakeContext]:
    runners = [runner for runner in engine.runners if isinstance(runner, TensorRTStageRunner)]
    return [context for runner in runners for context in runner._contexts.values()]


def test_stages_run_in_order_on_one_stream_and_share_plans(world: World) -> None:
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2, 3]})
        launched = world.recorder.of("cuLaunchKernel")
        assert [arguments[0] for arguments in launched] == [spec.kind for spec in world.artifact.stages]
        assert {arguments[8] for arguments in launched} == {7}
        assert len(world.module.opened) == len({spec.kind for spec in world.artifact.stages})
    assert world.recorder.unguarded == []
    assert world.recorder.depth == 0


def test_between_stages_nothing_crosses_to_the_host(world: World) -> None:
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2, 3]})
        world.recorder.calls.clear()
        session.step({row: [4, 5]})
        kinds = [name for name in world.recorder.names() if name.startswith(("cuMemcpy", "cuLaunch", "cuMemAlloc"))]
        first, last = kinds.index("cuLaunchKernel"), len(kinds) - kinds[::-1].index("cuLaunchKernel")
        assert set(kinds[first:last]) == {"cuLaunchKernel"}
        assert set(kinds[:first]) == {"cuMemcpyHtoDAsync"}
        assert set(kinds[last:]) == {"cuMemcpyDtoHAsync"}


def test_decode_is_eager_once_then_captured_then_replayed(world: World) -> None:
    num_stages = len(world.artifact.stages)
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        counts = []
        for token in range(4):
            world.recorder.calls.clear()
            session.step({row: [token]})
            names = world.recorder.names()
            counts.append([names.count(n) for n in ("cuStreamBeginCapture", "cuGraphLaunch", "cuLaunchKernel")])
        assert counts[0] == [0, 0, num_stages]
        assert counts[1] == [num_stages, num_stages, num_stages]
        assert counts[2] == counts[3] == [0, num_stages, 0]
    assert world.recorder.names().count("cuGraphExecDestroy") == num_stages


def test_addresses_are_set_once(world: World) -> None:
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1]})
        before = [len(context.log) for context in contexts(engine)]
        session.step({row: [2]})
        session.step({row: [3]})
        assert [len(context.log) for context in contexts(engine)] == before


def test_caches_have_one_address_and_layers_their_own(world: World) -> None:
    with world.engine() as engine:
        session = Session(engine)
        session.step({session.add(): [1, 2]})
        seen: dict[str, int] = {}
        for runner in engine.runners:
            assert isinstance(runner, TensorRTStageRunner)
            (context,) = runner._contexts.values()
            for tensor in runner.spec.outputs:
                if tensor.alias is not None:
                    assert context.addresses[tensor.name] == context.addresses[tensor.alias]
            if "window_kv" in context.addresses:
                seen[runner.spec.name] = context.addresses["window_kv"]
        assert len(set(seen.values())) == len(seen) > 1


def test_what_cannot_be_captured_runs_eagerly_and_says_why(world: World, tensorrt_log: list[str]) -> None:
    world.recorder.failures["cuStreamEndCapture"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        for token in range(4):
            session.step({row: [token]})
        assert session.length(row) == 4
    assert len(tensorrt_log) == len(world.artifact.stages)
    assert all("runs without CUDA graphs" in reason and "CAPTURE_UNSUPPORTED" in reason for reason in tensorrt_log)
    assert world.recorder.names().count("cuGraphLaunch") == 0


def test_an_engine_that_is_not_capturable_is_not_tried(world: World) -> None:
    for fake in world.module.engines.values():
        fake.capturable = False
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        for token in range(3):
            session.step({row: [token]})
    assert "cuStreamBeginCapture" not in world.recorder.names()


def test_a_failed_step_leaves_the_session_as_it_was(world: World) -> None:
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        session.step({row: [1, 2, 3]})
        context = contexts(engine)[3]
        context.fails = True
        with pytest.raises(BackendError, match="a step that runs"):
            session.step({row: [4, 5]})
        assert session.length(row) == 3
        context.fails = False
        session.step({row: [4, 5]})
        assert session.length(row) == 5
    assert world.recorder.depth == 0


def test_weights_reach_their_binding(world: World) -> None:
    with world.engine() as engine:
        runner = engine.runners[0]
        assert isinstance(runner, TensorRTStageRunner)
        values = runner.weights[WEIGHT.name].read((4,))
        np.testing.assert_array_equal(values, [0, 1, 2, 3])


def test_a_size_outside_the_profiles_is_named(world: World) -> None:
    manifest = EnginesManifest.read(world.folder)

    def narrow(plan: PlanRecord) -> PlanRecord:
        profiles = {
            name: {**p, **({"tokens": (1, 2, 2)} if "tokens" in p else {})} for name, p in plan.profiles.items()
        }
        return replace(plan, profiles=profiles)

    world.change(plans=tuple(narrow(plan) for plan in manifest.plans))
    with world.engine() as engine:
        session = Session(engine)
        row = session.add()
        with pytest.raises(RequestError, match=r"tokens: found 3; expected 1..2"):
            session.step({row: [1, 2, 3]})
        assert session.length(row) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"artifact_digest": "0"}, "engines of an earlier export"),
        ({"backend_version": "11.3.0"}, "engines of tensorrt 11.3.0; expected engines of the installed version 11.4.0"),
        ({"targets": (89, 120)}, "engines for sm_89, sm_120; expected engines for sm_90"),
        ({"backend": "tensorrt_rtx"}, "no engines for tensorrt"),
        ({"stages": ()}, "no engines for engram_hash, embedding"),
        ({"plugins": {"CacheWrite": {"version": "1", "abi": "f" * 64}}}, "plugin CacheWrite"),
    ],
)
def test_a_build_for_something_else_is_refused(world: World, changes: dict[str, object], said: str) -> None:
    world.choose()
    world.change(**changes)
    with pytest.raises(ArtifactError, match="engram-trt build") as caught:
        world.choose()
    assert said in str(caught.value)


def test_a_changed_manifest_is_refused(world: World) -> None:
    path = world.folder / "manifest.json"
    path.write_text(path.read_text().replace("11.4.0", "11.5.0"))
    with pytest.raises(ArtifactError, match="changed after it was written"):
        world.choose()


def test_a_corrupt_plan_is_refused(world: World) -> None:
    plan = world.folder / EnginesManifest.read(world.folder).plans[0].file.path
    content = plan.read_bytes()
    plan.write_bytes(content[:-1] + b"?")
    with pytest.raises(ArtifactError, match="SHA-256"):
        world.engine()


def test_a_plan_that_tensorrt_cannot_open_is_refused(world: World) -> None:
    backend = world.backend()
    world.module.engines.clear()
    with pytest.raises(ArtifactError, match="a plan that TensorRT cannot open"):
        open_engine(world.api, world.module, backend.build, backend.build.manifest.plans[0])


def forget_alias(engine: FakeEngine) -> None:
    engine.aliases["window_kv_out"] = None


def other_dtype(engine: FakeEngine) -> None:
    engine.dtypes["pre_mix"] = "bfloat16"


def other_shape(engine: FakeEngine) -> None:
    engine.shapes["some.weight"] = (5,)


def one_name_less(engine: FakeEngine) -> None:
    engine.names.remove("some.weight")


def one_profile_less(engine: FakeEngine) -> None:
    engine.num_optimization_profiles = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget_alias, "window_kv_out: found alias of None; expected alias of window_kv"),
        (other_dtype, "pre_mix: found bfloat16; expected float32"),
        (other_shape, "some.weight: found shape [5]; expected [4]"),
        (one_name_less, "a difference in some.weight"),
        (one_profile_less, "profiles: found 1; expected 2"),
    ],
)
def test_an_engine_of_another_stage_is_refused(world: World, change: Callable[[FakeEngine], None], said: str) -> None:
    change(world.module.engines[b"plan of window"])
    with pytest.raises(ArtifactError, match="engine of block_00") as caught:
        world.engine()
    assert said in str(caught.value)


def test_out_of_memory_says_for_what_and_how_much_is_free(world: World) -> None:
    world.recorder.failures["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY.* of 1,073,741,824 bytes free"):
        world.engine()


def test_closing_gives_everything_back(world: World) -> None:
    engine = world.engine()
    session = Session(engine)
    row = session.add()
    for token in range(3):
        session.step({row: [token]})
    engine.backend.close()
    assert len(world.recorder.of("cuMemFree")) == len(world.recorder.of("cuMemAlloc"))
    engine.backend.close()


def test_no_such_device() -> None:
    with pytest.raises(CudaError, match=r"cuda:3: found 1 device"):
        CudaDriver(RecordedDriver(), 3)


def test_bfloat16_is_rounded_to_nearest_even_and_comes_back() -> None:
    one = np.float32(1)
    step = np.float32(2**-7)
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, np.inf, -np.inf, np.nan, 0, 3.4e38], dtype=np.float32)
    expected = np.array([one, one, one + 2 * step, -2.5, np.inf, -np.inf, np.nan, 0, np.inf], dtype=np.float32)
    np.testing.assert_array_equal(from_stored("bfloat16", to_stored("bfloat16", values)), expected)


def test_a_device_buffer_holds_what_was_written() -> None:
    driver = CudaDriver(RecordedDriver())
    buffer = DeviceBuffer(driver, driver.create_stream(), "bfloat16", 6, "a test")
    buffer.clear()
    buffer.write(np.array([1.5, -2.0], dtype=np.float32), offset=2)
    np.testing.assert_array_equal(buffer.read((2, 3)), [[0, 0, 1.5], [-2, 0, 0]])
    with pytest.raises(ValueError, match="of a buffer of 6"):
        buffer.write(np.zeros(5, dtype=np.float32), offset=2)
