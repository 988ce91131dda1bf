"""ONNX form: the function body is traced from the reference."""

from __future__ import annotations

import onnx

from engram_trt.plugins.hyper_connection_mix import reference
from engram_trt.plugins.onnx_functions import NodeVariant, traced_function


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for one set of attributes and dtype."""
    return traced_function(reference.hyper_connection_mix, variant, overload)
