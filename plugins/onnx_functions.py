"""ONNX function bodies of the ops: traced from their references, or written by hand where a loop is wanted.

A body depends on the op, its attributes, its dtype and which inputs a node has. Where one graph holds several
(`QuantizeDequantize` in three formats), nodes and functions tell them apart by `overload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import torch
from onnx import helper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from engram_trt.plugins.float_tables import TORCH_DTYPES
from engram_trt.plugins.onnx_exporter import OPSET, fast_exporter
from engram_trt.plugins.onnx_translation import PLUGIN_ATTRIBUTES, PRIMITIVE_TRANSLATIONS
from engram_trt.plugins.spec import NAMESPACE, AttributeValue, Operand, PluginSpec

DYNAMIC_SIZES = {
    "batch": 3,
    "tokens": 5,
    "rows": 7,
    "ring": 601,
    "entries": 613,
    "visible": 619,
    "capacity": 631,
}
"""Extents that vary at run time, with the value a trace uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVariant:
    """What a function body depends on.

    Args:
        spec: the op.
        attributes: values by name.
        dtype: the stage's dtype ("float32" or "bfloat16"), the meaning of T.
        num_inputs: present inputs; trailing optional ones may be absent.
        sizes: fixed extents by symbol.
    """

    spec: PluginSpec
    attributes: Mapping[str, AttributeValue]
    dtype: str
    num_inputs: int
    sizes: Mapping[str, int]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return self.spec.inputs[: self.num_inputs]


class _Reference(nn.Module):
    """A reference as a module: present tensors, None for absent ones, then the attributes."""

    def __init__(self, reference: Callable[..., object], variant: NodeVariant) -> None:
        super().__init__()
        self.reference, self.variant = reference, variant

    def forward(self, *tensors: Tensor) -> object:
        variant = self.variant
        absent = [None] * (len(variant.spec.inputs) - variant.num_inputs)
        attributes = [variant.attributes[name] for name in variant.spec.attribute_names]
        results = self.reference(*tensors, *absent, *attributes)
        if isinstance(results, tuple):
            return tuple(result for result in results if result is not None)
        return results


def function_proto(
    variant: NodeVariant, nodes: list[onnx.NodeProto], outputs: list[str], overload: str = ""
) -> onnx.FunctionProto:
    """A model-local function with the op's name, inputs and attributes."""
    function = helper.make_function(
        NAMESPACE,
        variant.spec.name,
        [operand.name for operand in variant.inputs],
        outputs,
        nodes,
        [helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
        attributes=[*variant.spec.attribute_names, *PLUGIN_ATTRIBUTES],
    )
    function.overload = overload
    return function


def traced_function(reference: Callable[..., object], variant: NodeVariant, overload: str = "") -> onnx.FunctionProto:
    """Trace a reference into a function body.

    Args:
        reference: called with the op's inputs, then its attributes.
        variant: what to trace it for.
        overload: tells functions of one op apart.

    Raises:
        RuntimeError: the exporter wrote another opset, or lost an input.
    """
    dims: dict[str, object] = {}
    shapes = [_axes(operand, variant.sizes, dims) for operand in variant.inputs]
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        examples = tuple(_example(operand, variant) for operand in variant.inputs)
    names = [operand.name for operand in variant.inputs]
    with fast_exporter(), torch.no_grad():
        program = torch.onnx.export(
            _Reference(reference, variant).eval(),
            examples,
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            dynamic_shapes=(tuple(shapes),),
            custom_translation_table=dict(PRIMITIVE_TRANSLATIONS),
            verbose=False,
        )
        if program is None:
            raise RuntimeError(f"{variant.spec.name}: the exporter returned nothing")
        model = program.model_proto
    graph = model.graph
    opsets = {item.domain: item.version for item in model.opset_import}
    if opsets.get("") != OPSET or [value.name for value in graph.input] != names:
        raise RuntimeError(f"{variant.spec.name}: opset {opsets} or inputs differ from what was asked for")
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    outputs = [value.name for value in graph.output]
    return function_proto(variant, [*constants, *graph.node], outputs, overload)


def _resolve(extent: str | int, sizes: Mapping[str, int]) -> int:
    if isinstance(extent, int):
        return extent
    return DYNAMIC_SIZES[extent] if extent in DYNAMIC_SIZES else sizes[extent]


def _example(operand: Operand, variant: NodeVariant) -> Tensor:
    dtype = variant.dtype if operand.dtype in ("T", "W", "C") else operand.dtype
    shape = [_resolve(extent, variant.sizes) for extent in operand.shape]
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype])


def _axes(operand: Operand, sizes: Mapping[str, int], dims: dict[str, object]) -> dict[int, object] | None:
    axes: dict[int, object] = {}
    for axis, extent in enumerate(operand.shape):
        if isinstance(extent, str) and extent in DYNAMIC_SIZES:
            dims.setdefault(extent, torch.export.Dim(extent, min=1, max=2**31 - 2))
            axes[axis] = dims[extent]
    return axes or None
