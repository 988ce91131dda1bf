"""ONNX form: the function body is traced from the reference."""

from __future__ import annotations

import onnx

from engram_trt.plugins.onnx_functions import NodeVariant, traced_function
from engram_trt.plugins.sparse_attention import reference


def function(variant: NodeVariant, overload: str) -> onnx.FunctionProto:
    """The body for one set of attributes and dtype."""
    return traced_function(reference.sparse_attention, variant, overload)
