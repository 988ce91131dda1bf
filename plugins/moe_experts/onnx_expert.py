"""The part that every ONNX form with experts shares: a loop over the distinct ids, one expert's products a turn.

At most one expert's three matrices exist in float at a time; everything else is bound as it is stored.

Packed codes are looked up low nibbles first, then high ones, and stay so within each group of 32: to interleave the
two would cost more than the lookup. The projections' inputs are put into the same order instead, even columns of a
group before odd ones, which leaves every product and every group's rounding, and only reorders sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from engram_trt.plugins.float_tables import E2M1_PAIR_TABLE, E8M0_TABLE
from engram_trt.plugins.moe_experts.spec import GROUP
from engram_trt.plugins.onnx_exporter import OPSET
from engram_trt.plugins.onnx_functions import NodeVariant, function_proto
from engram_trt.plugins.onnx_translation import PLUGIN_ATTRIBUTES
from engram_trt.plugins.quantize_dequantize.spec import SPEC as QUANTIZE_DEQUANTIZE
from engram_trt.plugins.spec import NAMESPACE

_EXPERT = """
    expert = Gather <axis = 0> (used, iteration)
    hit = Equal (chosen, expert)
    places = NonZero (hit)
    rows = Gather <axis = 0> (places, first)
    pairs = Transpose <perm = [1, 0]> (places)
    routing_rows = GatherND (routing, pairs)
    routing_column = Unsqueeze (routing_rows, last)
    stored_x = Gather <axis = 0> (ordered_ffn_in, rows)
    x = {round_op} (stored_x)
{weights}
    gate_T = Gemm <transB = 1> (x, w1)
    up_T = Gemm <transB = 1> (x, w3)
    gate_f = Cast <to = 1> (gate_T)
    up_f = Cast <to = 1> (up_T)
{clamp}
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    product = Mul (silu, up)
    weighted = Mul (product, routing_column)
    hidden = Cast <to = {T}> (weighted)
{order_hidden}
    rounded_hidden = {round_op} (ordered_hidden)
    output_T = Gemm <transB = 1> (rounded_hidden, w2)
    go_on_out = Identity (go_on_in)
{keep}
"""

_CLAMP = """
    high = Constant <value = float {{{limit!r}}}> ()
    low = Constant <value = float {{-{limit!r}}}> ()
    gate = Min (gate_f, high)
    up_low = Max (up_f, low)
    up = Min (up_low, high)
"""

_NO_CLAMP = """
    gate = Identity (gate_f)
    up = Identity (up_f)
"""

_FLOAT_WEIGHT = """
    {w} = Gather <axis = 0> (experts_{w}, expert)
"""

_PACKED_WEIGHT = """
    {w}_codes = Gather <axis = 0> (experts_{w}, expert)
    {w}_code_rows = Cast <to = 6> ({w}_codes)
    {w}_index = Reshape ({w}_code_rows, last)
    {w}_low = GatherElements <axis = 0> (e2m1_low, {w}_index)
    {w}_high = GatherElements <axis = 0> (e2m1_high, {w}_index)
    {w}_low_groups = Reshape ({w}_low, half_group_shape)
    {w}_high_groups = Reshape ({w}_high, half_group_shape)
    {w}_groups = Concat <axis = 1> ({w}_low_groups, {w}_high_groups)
    {w}_bytes = Gather <axis = 0> (experts_{w}_scale, expert)
    {w}_byte_rows = Cast <to = 6> ({w}_bytes)
    {w}_exponents = Reshape ({w}_byte_rows, last)
    {w}_factors = Gather <axis = 0> (e8m0_column, {w}_exponents)
    {w}_scaled = Mul ({w}_groups, {w}_factors)
    {w}_rows = Shape <start = 0, end = 1> ({w}_codes)
    {w}_shape = Concat <axis = 0> ({w}_rows, last)
    {w}_flat = Reshape ({w}_scaled, {w}_shape)
    {w} = Cast <to = {T}> ({w}_flat)
"""

_EVEN_THEN_ODD = """
    {x}_pairs = Reshape ({x}, pair_shape)
    {x}_halves = Transpose <perm = [0, 2, 1]> ({x}_pairs)
    {x}_shape = Shape ({x})
    ordered_{x} = Reshape ({x}_halves, {x}_shape)
"""

_AS_STORED = """
    ordered_{x} = Identity ({x})
"""

_LOOP = """
    last = Constant <value_ints = [-1]> ()
    first = Constant <value_int = 0> ()
    go_on = Constant <value = bool {{1}}> ()
{before}
    num_used = Size (used)
{order_in}
    {results} = Loop (num_used, go_on, {starts}) <body = per_expert
        (int64 iteration, bool go_on_in, {taken}) => (bool go_on_out, {given})
        {{ {body} }}
    >
{after}
"""


@dataclass(frozen=True, slots=True)
class LoopState:
    """A value that goes from one expert to the next.

    Args:
        name: the turn of an expert reads `<name>_in` and gives `<name>_out`.
        type: type and extents, e.g. "float[rows, dim]".
        start: value before the first expert.
        result: name of the value behind the last one.
    """

    name: str
    type: str
    start: str
    result: str


def expert_loop(
    variant: NodeVariant, overload: str, *, before: str, states: Sequence[LoopState], keep: str, after: str = ""
) -> onnx.FunctionProto:
    """The function body of an op with experts.

    Args:
        variant: packed or float experts, with or without input rounding, in one dtype; its attributes hold
            `swiglu_limit` and `activation_format`, its inputs `ffn_in` and the experts.
        overload: tells functions of one op apart.
        before: nodes ahead of the loop. They may use `last`, `first` and `go_on`, and must give `chosen` int64 [rows,
            activated] and `routing` float32 likewise, `used` (the distinct ids, ascending), and the states' starts.
        states: of the loop.
        keep: nodes that put the outputs of one expert, `output_T`, into the states; `rows` [pairs] and `pairs`
            [pairs, 2] (row, slot) tell whose they are.
        after: nodes behind the loop.
    """
    limit, packed = float(variant.attributes["swiglu_limit"]), is_packed(variant)
    weight, order = (_PACKED_WEIGHT, _EVEN_THEN_ODD) if packed else (_FLOAT_WEIGHT, _AS_STORED)
    body = _EXPERT.format(
        weights="".join(weight.format(w=name, T=data_type(variant)) for name in ("w1", "w2", "w3")),
        clamp=_CLAMP.format(limit=limit) if limit > 0 else _NO_CLAMP,
        round_op="Identity" if variant.attributes["activation_format"] < 0 else "RoundInput",
        order_hidden=order.format(x="hidden"),
        T=data_type(variant),
        keep=keep,
    )
    source = _LOOP.format(
        before=before,
        order_in=order.format(x="ffn_in"),
        results=", ".join(state.result for state in states),
        starts=", ".join(state.start for state in states),
        taken=", ".join(f"{state.type} {state.name}_in" for state in states),
        given=", ".join(f"{state.type} {state.name}_out" for state in states),
        body=body,
        after=after,
    )
    nodes = _parse(source, variant)
    return function_proto(variant, _constants() + nodes if packed else nodes, list(variant.spec.output_names), overload)


def data_type(variant: NodeVariant) -> int:
    """ONNX number of the stage's dtype."""
    return int(TensorProto.BFLOAT16 if variant.dtype == "bfloat16" else TensorProto.FLOAT)


def is_packed(variant: NodeVariant) -> bool:
    """Whether a node has scales, which belong to packed experts alone."""
    return variant.num_inputs == len(variant.spec.inputs)


def _constants() -> list[onnx.NodeProto]:
    """Lookup tables and shapes of the packed form."""
    pairs = E2M1_PAIR_TABLE.numpy()
    tables = {"e2m1_low": pairs[:, 0], "e2m1_high": pairs[:, 1], "e8m0_column": E8M0_TABLE.reshape(-1, 1).numpy()}
    shapes = {
        "half_group_shape": [-1, GROUP // 2],
        "pair_shape": [-1, GROUP // 2, 2],
    }
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values.copy(), name))
        for name, values in tables.items()
    ]
    return constants + [helper.make_node("Constant", [], [name], value_ints=shape) for name, shape in shapes.items()]


def _parse(source: str, variant: NodeVariant) -> list[onnx.NodeProto]:
    header = f'<opset_import: ["" : {OPSET}], domain: "{NAMESPACE}">\n'
    names = ", ".join(operand.name for operand in variant.inputs)
    text = f"{header}{variant.spec.name} ({names}) => ({variant.spec.output_names[0]}) {{ {source} }}"
    nodes = list(parser.parse_function(text).node)
    _name_rounding(nodes, int(variant.attributes["activation_format"]))
    return nodes


def _name_rounding(nodes: list[onnx.NodeProto], format: int) -> None:
    """Turn the placeholder of the template into a call of `QuantizeDequantize`."""
    for node in nodes:
        if node.op_type == "RoundInput":
            node.op_type, node.domain, node.overload = QUANTIZE_DEQUANTIZE.name, NAMESPACE, str(format)
            plugin = dict(zip(PLUGIN_ATTRIBUTES, (NAMESPACE, QUANTIZE_DEQUANTIZE.version), strict=True))
            attributes = {"format": format, **plugin}
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _name_rounding(list(attribute.g.node), format)
