"""Faulty plans are refused: each fault is built once, in a builder process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from engine_jobs_for_tests import pool_in, run_job, stage_job, with_input, with_output
from onnx import helper

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.engines.model import PluginNode
from engram_trt.export.engines.network import (
    BuildError,
    check_log,
    check_no_cache_copied,
    check_plan_plugins,
    plan_layers,
)

BLOCK = "block_00"


def engram_node(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op)


def without_attribute(op: str, name: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        node = engram_node(model, op)
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)

    return change


def with_spare_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("spare", onnx.TensorProto.FLOAT, [4]))


def test_a_node_without_namespace_is_named_before_the_parser(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path, without_attribute("CacheWrite", "plugin_namespace"))
    with pytest.raises(BuildError, match=r"CacheWrite.*no attribute plugin_namespace"):
        run_job(pool_in(tmp_path), job)


def test_a_fallback_to_the_function_body_is_seen_in_the_network(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, "engram_hash", tmp_path, without_attribute("EngramHash", "plugin_namespace"))
    job = replace(job, check_legality=False, keep_bodies=True)
    # The body of the hash holds an XOR of INT64, which the parser refuses: it was taken for the plugin.
    with pytest.raises(BuildError, match=r"engram_hash: (parser|node).*"):
        run_job(pool_in(tmp_path), job)


def test_a_missing_attribute_refuses_creation(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path, without_attribute("CacheWrite", "mode"))
    with pytest.raises(BuildError, match=r"plugin CacheWrite: fields: found missing mode"):
        run_job(pool_in(tmp_path), replace(job, check_legality=False))


def test_an_unused_input_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path, with_spare_input)
    spare = TensorSpec(name="spare", dtype="float32", shape=(4,), role="step")
    # The weights follow the stage's inputs, so the spare one is the last of the stage's own.
    stage = replace(job.stage, inputs=(*job.stage.inputs, spare))
    with pytest.raises(BuildError, match=r"input spare: found an input that nothing reads"):
        run_job(pool_in(tmp_path), replace(job, stage=stage))


def test_an_input_the_spec_does_not_know_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"inputs: found .*spare"):
        run_job(pool_in(tmp_path), stage_job(tiny_artifact, BLOCK, tmp_path, with_spare_input))


def test_a_wrong_alias_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    stage = with_output(job.stage, "window_kv_out", alias=None)
    with pytest.raises(BuildError, match=r"output window_kv_out: found alias of window_kv; expected alias of None"):
        run_job(pool_in(tmp_path), replace(job, stage=stage))


def test_a_cache_that_is_not_updated_in_place_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    def copy_instead(model: onnx.ModelProto) -> None:
        node = engram_node(model, "CacheWrite")
        output = node.output[0]
        for other in model.graph.node:
            for place, name in enumerate(other.input):
                if name == output:
                    other.input[place] = "written"
        node.output[0] = "written"
        model.graph.node.append(helper.make_node("Identity", ["written"], [output], name="copy"))

    with pytest.raises(BuildError, match=r"output window_kv_out: found alias of None; expected alias of window_kv"):
        run_job(pool_in(tmp_path), stage_job(tiny_artifact, BLOCK, tmp_path, copy_instead))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("pre_mix", {"dtype": "bfloat16"}, "input pre_mix: found float32; expected bfloat16"),
        ("start_positions", {"dtype": "int32"}, "input start_positions: found int64; expected int32"),
        ("experts_w1", {"shape": (8, 64, 65)}, "input experts_w1: found shape [8, 64, 64]; expected [8, 64, 65]"),
    ],
)
def test_a_binding_off_by_one_is_refused(
    tiny_artifact: Path, tmp_path: Path, name: str, changes: dict[str, object], said: str
) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    with pytest.raises(BuildError) as caught:
        run_job(pool_in(tmp_path), replace(job, stage=with_input(job.stage, name, **changes)))
    assert said in str(caught.value)


def test_a_plugin_input_of_another_dtype_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    def narrow_positions(model: onnx.ModelProto) -> None:
        node = engram_node(model, "CacheWrite")
        cast = helper.make_node("Cast", [node.input[2]], ["narrow"], name="narrow", to=onnx.TensorProto.INT32)
        model.graph.node.insert(0, cast)
        node.input[2] = "narrow"

    with pytest.raises(BuildError, match=r"write_positions is int32, expected int64"):
        run_job(pool_in(tmp_path), stage_job(tiny_artifact, BLOCK, tmp_path, narrow_positions))


def test_a_profile_outside_the_graph_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    profiles = {"decode": {**job.profiles["decode"], "batch": (3, 2, 1)}}
    with pytest.raises(BuildError, match=r"profile decode"):
        run_job(pool_in(tmp_path), replace(job, profiles=profiles))


def test_a_builder_over_its_memory_is_stopped_and_named(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    with pytest.raises(BuildError, match=rf"{BLOCK}: found a builder that took .* was stopped.*--max-build-memory"):
        run_job(pool_in(tmp_path, memory_bytes=60 << 20), job)


def test_a_builder_over_its_time_is_stopped_and_named(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    with pytest.raises(BuildError, match=rf"{BLOCK}: found a builder that ran for .* was stopped.*--max-build-minutes"):
        run_job(pool_in(tmp_path, seconds=0.3), job)


def test_a_damaged_stage_file_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    job = stage_job(tiny_artifact, BLOCK, tmp_path)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(Path(job.onnx).read_bytes()[:5000])
    with pytest.raises(BuildError, match=r"broken.onnx: found no ONNX model"):
        run_job(pool_in(tmp_path), replace(job, onnx=str(broken)))


# --- what is read out of the builder's log ------------------------------------------------------------------------

CACHE = "Location: Device, Dimensions: [-1,40,64], Datatype: Float"
WRITE = (
    f"Name: write, LayerType: PluginV3, Inputs: [ {{ Name: cache, {CACHE} }}], "
    f"Outputs: [ {{ Name: cache_out, {CACHE} }}], TacticName: x"
)
ATTEND = (
    "Name: attend_myl8_9, LayerType: custom_layer, Inputs: [ { Name: cache_out, Dimensions: [-1,40,64], Strides: [1] "
    "}], Constants: [], Outputs: [ { Name: y [profile 1], Dimensions: [-1,-1,64], Strides: [1] }], TacticName: "
)
COPY = (
    "Name: move, LayerType: kgen, Inputs: [ { Name: cache, Dimensions: [-1,40,64] }], Constants: [], "
    "Outputs: [ { Name: other, Dimensions: [-1,40,64] }], TacticName: "
)
LISTED = f"Layers:\n{WRITE}\n{ATTEND}\n"


def cache_spec() -> StageSpec:
    cache = TensorSpec(name="cache", dtype="float32", shape=("batch", "window_ring", 64), role="state")
    out = replace(cache, name="cache_out", tensor="cache", alias="cache")
    return StageSpec(name="block_09", kind="k", inputs=(cache,), outputs=(out,))


def test_layers_are_read_from_the_list() -> None:
    first, second = plan_layers(LISTED)
    assert (first.name, first.kind) == ("write", "PluginV3")
    assert first.outputs == (("cache_out", "-1,40,64"),)
    assert second.outputs == (("y", "-1,-1,64"),)


def test_a_copied_cache_is_refused() -> None:
    check_no_cache_copied(cache_spec(), plan_layers(LISTED), {"window_ring": 40})
    with pytest.raises(BuildError, match=r"block_09: cache_out: found a copy of the cache: layer move \(kgen\)"):
        check_no_cache_copied(cache_spec(), plan_layers(LISTED + COPY), {"window_ring": 40})


def test_a_plugin_that_is_not_in_the_plan_is_refused() -> None:
    nodes = [PluginNode(name=name, op="Op", attributes={}, num_inputs=1, outputs=()) for name in ("write", "attend")]
    check_plan_plugins("s", plan_layers(LISTED), nodes, 1)
    with pytest.raises(BuildError, match=r"node write \(Op\): found 1 plugin layers"):
        check_plan_plugins("s", plan_layers(LISTED), nodes, 2)
    with pytest.raises(BuildError, match=r"node wri \(Op\): found 0"):
        check_plan_plugins("s", plan_layers(LISTED), [replace(nodes[0], name="wri")], 1)


def test_a_message_about_an_unused_input_is_an_error() -> None:
    check_log("s", ["Detected 48 inputs and 8 output network tensors."])
    with pytest.raises(BuildError, match=r"Unused Input: mask"):
        check_log("s", ["fine", "Unused Input: mask"])
