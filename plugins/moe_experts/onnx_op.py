"""ONNX form, by hand: a loop over the distinct chosen experts, so that only those are read and dequantised."""

from __future__ import annotations

import onnx

from engram_trt.plugins.moe_experts.onnx_expert import LoopState, expert_loop
from engram_trt.plugins.moe_experts.reference import WEIGHT_EPS
from engram_trt.plugins.onnx_functions import NodeVariant

_CHOICE = """
    k = Constant <value_ints = [{k}]> ()
    biased = Add (scores, selection_bias)
    best, chosen = TopK <axis = -1, largest = 1, sorted = 1> (biased, k)
    chosen_scores = GatherElements <axis = 1> (scores, chosen)
{normalise}
    route_scale = Constant <value = float {{{route_scale!r}}}> ()
    routing = Mul (weights, route_scale)
    used = Unique <sorted = 1> (chosen)
    shape = Shape (ffn_in)
    zeros = ConstantOfShape <value = float[1] {{0}}> (shape)
"""

_NORMALISE = """
    eps = Constant <value = float {{{eps!r}}}> ()
    total = ReduceSum <keepdims = 1> (chosen_scores, last)
    divisor = Add (total, eps)
    weights = Div (chosen_scores, divisor)
"""

_ADD = """
    output = Cast <to = 1> (output_T)
    targets = Unsqueeze (rows, last)
    sum_out = ScatterND <reduction = "add"> (sum_in, targets, output)
"""


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for packed or float experts, with or without input rounding, in one dtype."""
    attributes = variant.attributes
    k = int(attributes["n_activated_experts"])
    normalised = attributes["norm_topk_prob"] and k > 1
    choice = _CHOICE.format(
        k=k,
        normalise=_NORMALISE.format(eps=WEIGHT_EPS) if normalised else "    weights = Identity (chosen_scores)\n",
        route_scale=float(attributes["route_scale"]),
    )
    total = LoopState("sum", "float[rows, dim]", start="zeros", result="routed_output")
    return expert_loop(variant, overload, before=choice, states=[total], keep=_ADD)
