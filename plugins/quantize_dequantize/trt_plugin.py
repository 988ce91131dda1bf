"""`QuantizeDequantize` as a TensorRT plugin."""

from __future__ import annotations

from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.quantize_dequantize.launch import PLANNER
from engram_trt.plugins.trt_contract import OpPlugin


def needs_variant(variant: Variant, attributes: Attributes) -> bool:
    """One kernel a format."""
    return dict(variant.constants)["FORMAT"] == attributes["format"]


PLUGIN = OpPlugin(planner=PLANNER, needs_variant=needs_variant)
