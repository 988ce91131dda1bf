"""ONNX form, by hand: the loop of `MoEExperts` over the experts that are bound here and have a token.

Outputs are collected in a sequence and put into their places at the end: a loop copies every tensor it carries on, and
would copy all slots of all rows once per expert. Sequences know no bfloat16; in float32 every value stays as it is.
"""

from __future__ import annotations

import onnx

from engram_trt.plugins.moe_experts.onnx_expert import LoopState, data_type, expert_loop
from engram_trt.plugins.onnx_functions import NodeVariant

_LISTED = """
    no_expert = Constant <value_int = -1> ()
    chosen = Cast <to = 7> (expert_ids)
    routing = Identity (expert_weights)
    listed = Reshape (chosen, last)
    is_here = Greater (listed, no_expert)
    here = Compress (listed, is_here)
    used = Unique <sorted = 1> (here)
    width = Shape <start = 1, end = 2> (ffn_in)
    none = Constant <value_ints = [0]> ()
    none_by_width = Concat <axis = 0> (none, width)
    no_output = ConstantOfShape <value = float[1] {0}> (none_by_width)
    no_outputs = SequenceConstruct (no_output)
    none_by_two = Constant <value_ints = [0, 2]> ()
    no_place = ConstantOfShape <value = int64[1] {0}> (none_by_two)
    no_places = SequenceConstruct (no_place)
"""

_COLLECT = """
    output = Cast <to = 1> (output_T)
    outputs_out = SequenceInsert (outputs_in, output)
    places_out = SequenceInsert (places_in, pairs)
"""

_PUT = """
    slots = Shape (expert_ids)
    shape = Concat <axis = 0> (slots, width)
    zeros_f = ConstantOfShape <value = float[1] {{0}}> (shape)
    zeros = Cast <to = {T}> (zeros_f)
    all_outputs_f = ConcatFromSequence <axis = 0> (outputs)
    all_outputs = Cast <to = {T}> (all_outputs_f)
    all_places = ConcatFromSequence <axis = 0> (places)
    expert_outputs = ScatterND (zeros, all_places, all_outputs)
"""


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for packed or float experts, with or without input rounding, in one dtype."""
    outputs = LoopState("outputs", "seq(float[pairs, dim])", start="no_outputs", result="outputs")
    places = LoopState("places", "seq(int64[pairs, 2])", start="no_places", result="places")
    put = _PUT.format(T=data_type(variant))
    return expert_loop(variant, overload, before=_LISTED, states=[outputs, places], keep=_COLLECT, after=put)
