"""What TensorRT refuses, said before its parser is asked: the node, what it has, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engram_trt.configs.errors import BackendError
from engram_trt.export.engines.model import PLUGIN_ATTRIBUTES, graph_nodes
from engram_trt.plugins.registry import SPECS
from engram_trt.plugins.spec import NAMESPACE, PluginSpec

OPSETS = (23, 24)
"""23 brought RMSNormalization, 24 TensorScatter; the parser knows no later one."""

MAX_TOPK = 3840
MAX_ATTENTION_HEAD_DIM = 256

_T = onnx.TensorProto
_FP8 = (_T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ)
_REFUSED_TENSORS: Mapping[int, str] = {
    _T.UINT8: "carry the bytes as an INT8 view",
    _T.FLOAT8E8M0: "carry the scales as an INT8 view, or as float32 powers of two",
    _T.UINT64: "use INT64",
}
_BITWISE = ("BitwiseXor", "BitwiseAnd", "BitwiseOr", "BitwiseNot")


class LegalityError(BackendError):
    """A graph holds something that TensorRT does not take."""


def check_legality(model: onnx.ModelProto, stage: str) -> None:
    """Go through a stage's graph; bodies of our ops are not looked at, for plugins take their place.

    Args:
        model: of the stage.
        stage: its name, for messages.

    Raises:
        LegalityError: naming the first node or tensor at fault, and the remedy.
    """
    for where, found, expected, remedy in _findings(model):
        raise LegalityError(f"{stage}: {where}", found=found, expected=expected, remedy=remedy)


_Finding = tuple[str, str, str, str]


def _findings(model: onnx.ModelProto) -> Iterator[_Finding]:
    opset = {item.domain: item.version for item in model.opset_import}.get("")
    if opset not in OPSETS:
        yield "opset", str(opset), " or ".join(map(str, OPSETS)), "Export the checkpoint again."
    types = _element_types(model)
    constants = _constants(model)
    shapes = _shapes(model)
    yield from _refused_tensors(model)
    for node in graph_nodes(model.graph):
        where = f"node {node.name or node.op_type} ({node.op_type})"
        if node.domain == NAMESPACE:
            yield from _plugin(node, where)
        elif node.domain == "":
            yield from _standard(node, where, types, constants, shapes)


def _refused_tensors(model: onnx.ModelProto) -> Iterator[_Finding]:
    named = [(f"input {value.name}", value.type.tensor_type.elem_type) for value in model.graph.input]
    named += [(f"output {value.name}", value.type.tensor_type.elem_type) for value in model.graph.output]
    named += [(f"initializer {tensor.name}", tensor.data_type) for tensor in model.graph.initializer]
    for where, kind in named:
        if kind in _REFUSED_TENSORS:
            name = _type_name(kind)
            yield where, f"a tensor of {name}", "a type TensorRT has", f"Instead of {name}, {_REFUSED_TENSORS[kind]}."


def _plugin(node: onnx.NodeProto, where: str) -> Iterator[_Finding]:
    known: Mapping[str, PluginSpec] = {spec.name: spec for spec in SPECS}
    spec = known.get(node.op_type)
    if spec is None:
        yield where, f"domain {NAMESPACE}", f"one of {', '.join(known)}", "Export with this version of engram-trt."
        return
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    wanted = dict(zip(PLUGIN_ATTRIBUTES, (NAMESPACE, spec.version), strict=True))
    for name, value in wanted.items():
        given = attributes.get(name)
        if given is None or given.decode() != value:
            found = f"no attribute {name}" if given is None else f"{name} {given.decode()!r}"
            remedy = "Without it the parser takes the function body: export again with this version."
            yield where, found, f"{name} {value!r}", remedy
    own = set(attributes) - set(PLUGIN_ATTRIBUTES)
    if own != set(spec.attribute_names):
        differing = ", ".join(sorted(own ^ set(spec.attribute_names)))
        yield (
            where,
            f"attributes {sorted(own)} ({differing} too many or too few)",
            f"exactly {sorted(spec.attribute_names)}",
            "Export again with this version.",
        )


def _standard(
    node: onnx.NodeProto,
    where: str,
    types: Mapping[str, int],
    constants: Mapping[str, onnx.TensorProto],
    shapes: Mapping[str, tuple[int | None, ...]],
) -> Iterator[_Finding]:
    kind = types.get(node.input[0]) if node.input else None
    if node.op_type == "Gather" and (kind in _FP8 or kind == _T.UINT8):
        name = _type_name(kind)
        yield where, f"a gather of {name}", "float or INT8 data", "Gather INT8 views of the bytes."
    if node.op_type == "Cast":
        target = next((item.i for item in node.attribute if item.name == "to"), 0)
        if target in _FP8 or kind in _FP8:
            yield where, "a cast to or from FP8", "QuantizeLinear or DequantizeLinear", "Use a QDQ pair or a plugin."
        elif target in _REFUSED_TENSORS:
            yield where, f"a cast to {_type_name(target)}", "a type TensorRT has", _REFUSED_TENSORS[target]
    if node.op_type == "TopK" and len(node.input) > 1 and node.input[1] in constants:
        count = int(numpy_helper.to_array(constants[node.input[1]]).reshape(-1)[0])
        if count > MAX_TOPK:
            yield where, f"K = {count}", f"at most {MAX_TOPK}", "Use a plugin for the selection."
    if node.op_type in _BITWISE and kind != _T.BOOL:
        yield where, "bits of integers", "no bitwise operator on integers", "Move it into a plugin."
    if node.op_type == "Attention":
        head_dim = _head_dim(node, shapes)
        if head_dim is not None and head_dim > MAX_ATTENTION_HEAD_DIM:
            expected = f"at most {MAX_ATTENTION_HEAD_DIM}: TensorRT has no kernel for wider heads"
            yield where, f"head_dim {head_dim}", expected, "Use the SparseAttention plugin."


def _head_dim(node: onnx.NodeProto, shapes: Mapping[str, tuple[int | None, ...]]) -> int | None:
    shape = shapes.get(node.input[0], ())
    if len(shape) == 4:
        return shape[3]
    heads = next((item.i for item in node.attribute if item.name == "q_num_heads"), 0)
    return shape[2] // heads if len(shape) == 3 and shape[2] is not None and heads else None


def _values(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    yield from model.graph.input
    yield from model.graph.value_info
    yield from model.graph.output


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    types = {value.name: value.type.tensor_type.elem_type for value in _values(model)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return types | {name: tensor.data_type for name, tensor in _constants(model).items()}


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim
        )
        for value in _values(model)
    }


def _constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in graph_nodes(model.graph):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                found[node.output[0]] = attribute.t
            elif node.op_type == "Constant" and attribute.name == "value_ints":
                found[node.output[0]] = numpy_helper.from_array(np.array(attribute.ints, dtype=np.int64))
    return found


def _type_name(number: int | None) -> str:
    return {value.number: value.name for value in _T.DataType.DESCRIPTOR.values}.get(number or 0, str(number))
