"""ONNX form: the function body is traced from the reference, for rows of any width."""

from __future__ import annotations

from dataclasses import replace

import onnx
from torch import Tensor

from engram_trt.plugins.onnx_functions import NodeVariant, traced_function
from engram_trt.plugins.quantize_dequantize import reference
from engram_trt.plugins.quantize_dequantize.spec import GROUP_OF_FORMAT, SPEC
from engram_trt.plugins.spec import Operand


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for one format and dtype.

    One graph rounds rows of many widths, so the body sees groups as rows: a reshape in front and one behind.
    """
    format = int(variant.attributes["format"])
    group = GROUP_OF_FORMAT[format]

    def on_groups(x: Tensor, format: int) -> Tensor:
        return reference.quantize_dequantize(x, format)

    grouped = replace(SPEC, inputs=(replace_shape(SPEC.inputs[0], ("rows", group)),))
    inner = traced_function(on_groups, replace(variant, spec=grouped), overload)
    return wrapped_in_reshapes(inner, group)


def replace_shape(operand: Operand, shape: tuple[str | int, ...]) -> Operand:
    """The operand with other extents."""
    return replace(operand, shape=shape)


def wrapped_in_reshapes(function: onnx.FunctionProto, group: int) -> onnx.FunctionProto:
    """A function on [rows, group] as one on [..., width]: x is reshaped on entry, the result on return."""
    source, result = function.input[0], function.output[0]
    for node in function.node:
        node.input[:] = ["groups" if name == source else name for name in node.input]
        node.output[:] = ["rounded" if name == result else name for name in node.output]
    make = onnx.helper.make_node
    entry = [
        make("Constant", [], ["group_shape"], value_ints=[-1, group]),
        make("Reshape", [source, "group_shape"], ["groups"]),
    ]
    back = [make("Shape", [source], ["row_shape"]), make("Reshape", ["rounded", "row_shape"], [result])]
    body = [*entry, *function.node, *back]
    del function.node[:]
    function.node.extend(body)
    return function
