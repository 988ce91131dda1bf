"""Plugins of TensorRT-RTX launching kernels on a recorded driver: order, arguments, refusals, error codes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_recorder import CUresult, RecordedDriver

from engram_trt.configs.errors import ArtifactError, BackendError, KernelError
from engram_trt.plugins.kernels.plan import TRAILING_POINTERS, Clear, TensorInfo, Variant
from engram_trt.plugins.registry import SPECS
from engram_trt.plugins.tensorrt_api import TENSORRT_RTX, load
from engram_trt.plugins.trt_classes import PluginHost, creator_of
from engram_trt.plugins.trt_kernels import KernelLibrary, KernelRecord
from engram_trt.plugins.trt_launch import Call, KernelLauncher
from engram_trt.plugins.trt_plugins import plugin_of
from engram_trt.plugins.trt_registration import register_plugins
from engram_trt.runtime.cuda_driver import CudaDriver, CudaError

SM = 120
INDEXER = {"compress_ratio": 2, "index_topk": 32, "role": 0, "candidate_topk_blocks": 12, "candidate_block_size": 8}
PTX = {"i32": "b32", "i64": "b64", "fp32": "b32"}


def make_library(folder: Path, variants: Iterable[Variant], sm: int = SM) -> KernelLibrary:
    """Kernels whose machine code is their label."""
    records = []
    for variant in variants:
        image = f"{sm} {variant.label}".encode()
        digest = hashlib.sha256(image).hexdigest()
        (folder / f"{digest}.cubin").write_bytes(image)
        sizes = [PTX.get(kind, "b64") for _, kind in variant.signature] + ["b64"] * TRAILING_POINTERS
        records.append(
            KernelRecord(
                op=variant.op,
                label=variant.label,
                sm=sm,
                entry=variant.function,
                sha256=digest,
                num_bytes=len(image),
                num_threads=32 * variant.num_warps,
                shared_bytes=70_000 if "scores" in variant.function else 0,
                parameters=tuple(sizes),
            )
        )
    return KernelLibrary(folder, records)


def indexer_call(workspace: int = 1 << 20) -> Call:
    inputs = (
        TensorInfo(shape=(2, 3, 8, 32), dtype="float32"),
        TensorInfo(shape=(2, 3, 8), dtype="float32"),
        TensorInfo(shape=(2, 70, 32), dtype="float32"),
        TensorInfo(shape=(2,), dtype="int64"),
        TensorInfo(shape=(64,), dtype="int64"),
    )
    addresses = [4096 * n for n in range(1, 6)]
    return Call(plugin_of("Indexer"), INDEXER, inputs, addresses, [1 << 16], workspace, 7)


def launcher_for(tmp_path: Path, op: str, recorder: RecordedDriver) -> KernelLauncher:
    library = make_library(tmp_path, plugin_of(op).planner.variants(SM))
    return KernelLauncher(library, CudaDriver(recorder), SM)


def test_launches_follow_the_plan_in_order(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    launcher = launcher_for(tmp_path, "Indexer", recorder)
    recorder.calls.clear()
    call = indexer_call()
    launcher.run(call)
    infos = call.plugin.named_inputs(call.inputs)
    plan = call.plugin.planner.plan(infos, INDEXER, SM)
    expected = ["cuMemsetD8Async" if isinstance(step, Clear) else step.variant.function for step in plan.steps]
    found = [
        arguments[0] if name == "cuLaunchKernel" else name
        for name, arguments in recorder.calls
        if name in ("cuLaunchKernel", "cuMemsetD8Async")
    ]
    assert found == expected
    assert len(found) > 4
    assert recorder.unguarded == []
    assert all(arguments[8] == 7 for arguments in recorder.of("cuLaunchKernel"))


def test_arguments_are_addresses_numbers_and_two_null_pointers(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    launcher = launcher_for(tmp_path, "Indexer", recorder)
    launcher.run(indexer_call())
    scores = next(arguments for arguments in recorder.of("cuLaunchKernel") if arguments[0] == "index_scores_kernel")
    values, types = scores[9]
    assert values[:4] == (4096, 8192, 12288, 16384)
    assert values[4] == 1 << 20, "scores lie at the start of the workspace"
    assert values[-2:] == (0, 0)
    assert len(types) == len(values)
    variant = next(v for v in plugin_of("Indexer").planner.variants(SM) if v.function == "index_scores_kernel")
    assert scores[4:8] == (32 * variant.num_warps, 1, 1, 70_000)


def test_a_step_allocates_and_synchronises_nothing(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    launcher = launcher_for(tmp_path, "Indexer", recorder)
    recorder.calls.clear()
    launcher.run(indexer_call())
    allowed = {"cuLaunchKernel", "cuMemsetD8Async", "cuCtxPushCurrent", "cuCtxPopCurrent"}
    assert set(recorder.names()) <= allowed


def test_kernels_are_loaded_before_any_launch_and_get_their_shared_memory(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    launcher_for(tmp_path, "Indexer", recorder)
    entries = [arguments[1] for arguments in recorder.of("cuModuleGetFunction")]
    raised = [arguments[0] for arguments in recorder.of("cuFuncSetAttribute")]
    assert len(entries) == len(plugin_of("Indexer").planner.variants(SM))
    assert set(raised) == {entry.decode() for entry in entries if b"scores" in entry}


def cache_call(output: int, dtype: str = "float32", cache: int = 4096) -> Call:
    inputs = (
        TensorInfo(shape=(2, 40, 64), dtype=dtype),
        TensorInfo(shape=(2, 3, 64), dtype=dtype),
        TensorInfo(shape=(2,), dtype="int64"),
    )
    return Call(plugin_of("CacheWrite"), {"mode": 1}, inputs, [cache, 8192, 12288], [output], 0, 7)


def test_a_cache_at_two_addresses_is_refused(tmp_path: Path) -> None:
    launcher = launcher_for(tmp_path, "CacheWrite", RecordedDriver(sm=SM))
    launcher.run(cache_call(4096))
    with pytest.raises(KernelError, match="cache_out address: found 0x5000; expected 0x1000"):
        launcher.run(cache_call(0x5000))


def test_a_misaligned_address_is_refused(tmp_path: Path) -> None:
    launcher = launcher_for(tmp_path, "CacheWrite", RecordedDriver(sm=SM))
    with pytest.raises(KernelError, match=r"cache address.*a multiple of 16"):
        launcher.run(cache_call(4100, cache=4100))


def test_a_kernel_for_another_gpu_is_no_kernel(tmp_path: Path) -> None:
    library = make_library(tmp_path, plugin_of("CacheWrite").planner.variants(SM), sm=89)
    launcher = KernelLauncher(library, CudaDriver(RecordedDriver(sm=SM)), SM)
    with pytest.raises(KernelError, match=r"none compiled for sm_120 .* there for \[89\]\).*--target sm_120"):
        launcher.run(cache_call(4096))


def test_a_kernel_with_other_parameters_is_refused(tmp_path: Path) -> None:
    variants = plugin_of("CacheWrite").planner.variants(SM)
    records = [record for record in make_library(tmp_path, variants)]
    changed = [KernelRecord.from_json({**record.to_json(), "parameters": ["b64"]}) for record in records]
    launcher = KernelLauncher(KernelLibrary(tmp_path, changed), CudaDriver(RecordedDriver(sm=SM)), SM)
    with pytest.raises(KernelError, match="parameters of"):
        launcher.run(cache_call(4096))


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_damaged_machine_code_is_refused_at_loading(tmp_path: Path, damage: str) -> None:
    library = make_library(tmp_path, plugin_of("CacheWrite").planner.variants(SM))
    image = next(tmp_path.glob("*.cubin"))
    image.write_bytes(b"other") if damage == "change" else image.unlink()
    with pytest.raises(ArtifactError, match="engram-trt build"):
        KernelLauncher(library, CudaDriver(RecordedDriver(sm=SM)), SM)


def test_error_codes_become_errors(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    launcher = launcher_for(tmp_path, "CacheWrite", recorder)
    recorder.failures["cuLaunchKernel"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError, match="cuLaunchKernel: found CUDA_ERROR_INVALID_VALUE"):
        launcher.run(cache_call(4096))
    assert recorder.depth == 0, "the device stays current after an error"


# --- the plugin objects themselves --------------------------------------------------------------------------------


def rtx_host(launcher: KernelLauncher | None = None) -> PluginHost:
    return PluginHost(load(TENSORRT_RTX), (SM,), launcher)


def make_plugin(host: PluginHost, op: str, fields: dict[str, float | int | str]) -> Any:
    trt = host.api.module
    kept, items = [], []
    for name, value in fields.items():
        kind = trt.PluginFieldType.FLOAT32 if isinstance(value, float) else trt.PluginFieldType.INT32
        values = np.array([value], dtype=np.float32 if isinstance(value, float) else np.int32)
        kept.append(values)
        items.append(trt.PluginField(name, values, kind))
    creator = creator_of(host, plugin_of(op))
    return creator.create_plugin("some_node", trt.PluginFieldCollection(items), trt.TensorRTPhase.BUILD)


def test_a_creator_refuses_wrong_fields_and_says_which() -> None:
    host = rtx_host()
    assert make_plugin(host, "CacheWrite", {"mode": 1}) is not None
    assert make_plugin(host, "CacheWrite", {}) is None
    assert make_plugin(host, "CacheWrite", {"mode": 1.0}) is None
    assert make_plugin(host, "CacheWrite", {"mode": 1, "other": 2}) is None
    for refusal, said in zip(host.refusals, ("missing mode", "type float", "unknown other"), strict=True):
        assert said in refusal
    assert all("some_node" in refusal for refusal in host.refusals)


def test_a_plugin_survives_its_serialisation() -> None:
    host = rtx_host()
    fields = {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    plugin = make_plugin(host, "HyperConnectionMix", fields)
    serialized = plugin.get_fields_to_serialize()
    creator = creator_of(host, plugin_of("HyperConnectionMix"))
    again = creator.create_plugin("n", serialized, host.api.module.TensorRTPhase.RUNTIME)
    assert again is not None
    assert again.attributes == plugin.attributes
    assert again.attributes["hc_eps"] == float(np.float32(1e-6))
    assert again.num_outputs == 3


def descriptions(host: PluginHost, call: Call) -> list[Any]:
    """What TensorRT hands to `enqueue`: extents and dtype of each input."""
    return [SimpleNamespace(dims=info.shape, type=host.api.dtypes[info.dtype]) for info in call.inputs]


def test_enqueue_launches_on_the_given_stream(tmp_path: Path) -> None:
    recorder = RecordedDriver(sm=SM)
    host = rtx_host(launcher_for(tmp_path, "CacheWrite", recorder))
    plugin = make_plugin(host, "CacheWrite", {"mode": 1})
    call = cache_call(4096)
    assert plugin.enqueue(descriptions(host, call), [], call.input_addresses, call.output_addresses, 0, 11) == 0
    (launch,) = recorder.of("cuLaunchKernel")
    assert launch[8] == 11
    assert launch[9][0][:3] == (4096, 8192, 12288)


def test_enqueue_keeps_the_reason_of_a_failure(tmp_path: Path) -> None:
    launcher = launcher_for(tmp_path, "CacheWrite", RecordedDriver(sm=SM))
    host = rtx_host(launcher)
    plugin = make_plugin(host, "CacheWrite", {"mode": 1})
    call = cache_call(0x9000)
    with pytest.raises(KernelError):
        plugin.enqueue(descriptions(host, call), [], call.input_addresses, call.output_addresses, 0, 11)
    assert isinstance(launcher.last_error, KernelError)


def test_a_process_that_only_builds_cannot_launch() -> None:
    host = rtx_host()
    call = cache_call(4096)
    with pytest.raises(RuntimeError, match="plans are only built here"):
        make_plugin(host, "CacheWrite", {"mode": 1}).enqueue(
            descriptions(host, call), [], call.input_addresses, call.output_addresses, 0, 11
        )


def test_registration_is_idempotent(tmp_path: Path) -> None:
    api = load(TENSORRT_RTX)
    registry = api.module.get_plugin_registry()
    first = register_plugins(api, sms=(89,))
    count = len(registry.all_creators)
    second = register_plugins(api, sms=(120,))
    assert first is second
    assert set(first.sms) >= {89, 120}
    assert len(registry.all_creators) == count
    names = {creator.name for creator in registry.all_creators if creator.plugin_namespace == "engram"}
    assert names == {spec.name for spec in SPECS}


def test_an_unknown_or_absent_tensorrt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendError, match="tensorrt or tensorrt_rtx"):
        load("tensorrt_lite")
    with pytest.raises(BackendError, match=r"back end tensorrt: .*NVIDIA's package index"):
        load("tensorrt")
