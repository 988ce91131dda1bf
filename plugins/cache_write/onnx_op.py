"""ONNX form, by hand: one TensorScatter, which runtimes do in place when input and output share a buffer."""

from __future__ import annotations

import onnx
from onnx import helper

from engram_trt.plugins.onnx_functions import NodeVariant, function_proto


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """One body for both modes: a circular write is a linear one until it reaches the end of the cache, and an
    appended cache is sized so that it never does (`configs/limits.py`)."""
    node = helper.make_node(
        "TensorScatter", ["cache", "update", "write_positions"], ["cache_out"], axis=1, mode="circular"
    )
    return function_proto(variant, [node], ["cache_out"], overload)
