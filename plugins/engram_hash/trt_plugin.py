"""`EngramHash` as a TensorRT plugin."""

from __future__ import annotations

from engram_trt.plugins.engram_hash.launch import PLANNER
from engram_trt.plugins.trt_contract import OpPlugin

PLUGIN = OpPlugin(planner=PLANNER)
