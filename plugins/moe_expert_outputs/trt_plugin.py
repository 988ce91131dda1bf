"""`MoEExpertOutputs` as a TensorRT plugin."""

from __future__ import annotations

from engram_trt.plugins.moe_expert_outputs.launch import PLANNER
from engram_trt.plugins.moe_experts.trt_plugin import needs_variant
from engram_trt.plugins.trt_contract import OpPlugin

PLUGIN = OpPlugin(planner=PLANNER, needs_variant=needs_variant, stage_buffers=("activations", "hidden"))
