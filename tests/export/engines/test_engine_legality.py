"""What TensorRT refuses is named, with its remedy, before the parser is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from engram_trt.export.passes.legality import LegalityError, check_legality

CACHE_WRITE = {"mode": 1, "plugin_namespace": "engram", "plugin_version": "1"}


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, tuple[int, list[int | str]]],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 24,
) -> onnx.ModelProto:
    def values(table: dict[str, tuple[int, list[int | str]]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in table.items()]

    graph = helper.make_graph(list(nodes), "g", values(inputs), values(outputs), list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("engram", 1)])


def cache_write(**attributes: object) -> onnx.ModelProto:
    node = helper.make_node("CacheWrite", ["cache", "rows", "at"], ["out"], name="write", domain="engram", **attributes)
    shapes: list[int | str] = ["batch", 8, 4]
    inputs = {"cache": (T.FLOAT, shapes), "rows": (T.FLOAT, ["batch", 2, 4]), "at": (T.INT64, ["batch"])}
    return model_of([node], inputs, {"out": (T.FLOAT, shapes)})


def topk(k: int) -> onnx.ModelProto:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], name="top")
    count = numpy_helper.from_array(np.array([k], dtype=np.int64), "k")
    return model_of([node], {"x": (T.FLOAT, [1, 9000])}, {"v": (T.FLOAT, [1, k]), "i": (T.INT64, [1, k])}, [count])


def unary(op: str, kind: int, out: int, **attributes: object) -> onnx.ModelProto:
    node = helper.make_node(op, ["x"], ["y"], name="n", **attributes)
    return model_of([node], {"x": (kind, [4])}, {"y": (out, [4])})


def binary(op: str, kind: int) -> onnx.ModelProto:
    node = helper.make_node(op, ["x", "y"], ["z"], name="n")
    return model_of([node], {"x": (kind, [4]), "y": (kind, [4])}, {"z": (kind, [4])})


def gather(kind: int) -> onnx.ModelProto:
    node = helper.make_node("Gather", ["x", "i"], ["y"], name="n")
    return model_of([node], {"x": (kind, [9, 4]), "i": (T.INT64, [2])}, {"y": (kind, [2, 4])})


def attention(head_dim: int) -> onnx.ModelProto:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="n")
    shape: list[int | str] = ["batch", 8, "tokens", head_dim]
    return model_of([node], dict.fromkeys("qkv", (T.BFLOAT16, shape)), {"y": (T.BFLOAT16, shape)})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (cache_write(mode=1, plugin_version="1"), "node write (CacheWrite): found no attribute plugin_namespace"),
        (cache_write(**{**CACHE_WRITE, "plugin_version": "2"}), "plugin_version '2'; expected plugin_version '1'"),
        (cache_write(**{**CACHE_WRITE, "plugin_namespace": "other"}), "plugin_namespace 'other'"),
        (cache_write(plugin_namespace="engram", plugin_version="1"), "mode too many or too few"),
        (cache_write(**CACHE_WRITE, extra=1), "extra too many or too few"),
        (topk(3841), "node top (TopK): found K = 3841; expected at most 3840"),
        (gather(T.FLOAT8E4M3FN), "a gather of FLOAT8E4M3FN"),
        (gather(T.UINT8), "input x: found a tensor of UINT8"),
        (unary("Cast", T.FLOAT, T.FLOAT8E4M3FN, to=T.FLOAT8E4M3FN), "a cast to or from FP8"),
        (unary("Cast", T.FLOAT8E4M3FN, T.FLOAT, to=T.FLOAT), "a cast to or from FP8"),
        (unary("Identity", T.FLOAT8E8M0, T.FLOAT8E8M0), "a tensor of FLOAT8E8M0"),
        (binary("BitwiseXor", T.INT64), "node n (BitwiseXor): found bits of integers"),
        (binary("BitwiseAnd", T.INT32), "Move it into a plugin."),
        (binary("Add", T.UINT64), "a tensor of UINT64"),
        (attention(512), "head_dim 512"),
        (model_of([], {}, {}, opset=18), "opset: found 18; expected 23 or 24"),
    ],
)
def test_refused(model: onnx.ModelProto, said: str) -> None:
    with pytest.raises(LegalityError, match="block_02: ") as caught:
        check_legality(model, "block_02")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        cache_write(**CACHE_WRITE),
        topk(3840),
        gather(T.INT8),
        attention(64),
        binary("Mul", T.INT64),
        unary("Cast", T.FLOAT, T.INT64, to=T.INT64),
    ],
)
def test_accepted(model: onnx.ModelProto) -> None:
    check_legality(model, "block_02")


def test_an_unknown_op_of_ours_is_named() -> None:
    node = helper.make_node("Unheard", ["x"], ["y"], name="n", domain="engram")
    with pytest.raises(LegalityError, match="Unheard"):
        check_legality(model_of([node], {"x": (T.FLOAT, [1])}, {"y": (T.FLOAT, [1])}), "s")
