"""`MoEExperts` as a TensorRT plugin."""

from __future__ import annotations

from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.moe_experts.launch import PLANNER
from engram_trt.plugins.trt_contract import OpPlugin


def needs_variant(variant: Variant, attributes: Attributes) -> bool:
    """Kernels that round activations are compiled per format."""
    return dict(variant.constants).get("FORMAT", attributes["activation_format"]) == attributes["activation_format"]


PLUGIN = OpPlugin(
    planner=PLANNER,
    needs_variant=needs_variant,
    stage_buffers=("activations", "hidden", "expert_outputs"),
)
