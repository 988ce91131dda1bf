"""ONNX form, by hand: the loop of `MoEExperts` over the experts that are bound here and have a token."""

from __future__ import annotations

import onnx

from engram_trt.plugins.moe_experts.onnx_expert import expert_loop
from engram_trt.plugins.onnx_functions import NodeVariant

_LISTED = """
    no_expert = Constant <value_int = -1> ()
    chosen = Cast <to = 7> (expert_ids)
    routing = Identity (expert_weights)
    listed = Reshape (chosen, last)
    is_here = Greater (listed, no_expert)
    here = Compress (listed, is_here)
    used = Unique <sorted = 1> (here)
    slots_shape = Shape (expert_ids)
    width = Shape <start = 1, end = 2> (ffn_in)
    shape = Concat <axis = 0> (slots_shape, width)
    zeros = ConstantOfShape <value = {T}[1] {{0}}> (shape)
"""

_PUT = """
    outputs_out = ScatterND (outputs_in, pairs, output_T)
"""


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for packed or float experts, with or without input rounding, in one dtype."""
    element = "bfloat16" if variant.dtype == "bfloat16" else "float"
    return expert_loop(
        variant,
        overload,
        before=_LISTED.format(T=element),
        keep=_PUT,
        state=f"{element}[rows, activated, dim]",
        carried="outputs",
    )
