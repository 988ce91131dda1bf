"""ONNX form: the function body is traced from the reference."""

from __future__ import annotations

import onnx

from engram_trt.plugins.engram_gather import reference
from engram_trt.plugins.onnx_functions import NodeVariant, traced_function


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for one set of attributes and dtype."""
    return traced_function(reference.engram_gather, variant, overload)
