"""Contract of `QuantizeDequantize`: round a row to a small float format and back (spec 6.3)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec, Tolerance

FP8_E8M0_32, FP4_E8M0_32, FP4_E4M3_16 = 0, 1, 2
"""Formats: linear inputs and window rows; index queries and keys; compressed rows."""

GROUP_OF_FORMAT = {FP8_E8M0_32: 32, FP4_E8M0_32: 32, FP4_E4M3_16: 16}

SPEC = PluginSpec(
    name="QuantizeDequantize",
    inputs=(Operand(name="x", dtype="T", shape=("rows", "width"), meaning="rows; width is a multiple of the group"),),
    outputs=(Operand(name="y", dtype="T", shape=("rows", "width"), meaning="the nearest representable values"),),
    attributes=(Attribute(name="format", kind="int", meaning="0 FP8 E8M0/32, 1 FP4 E8M0/32, 2 FP4 E4M3/16"),),
    tolerance=Tolerance(rtol=0.0, atol=0.0),
)
