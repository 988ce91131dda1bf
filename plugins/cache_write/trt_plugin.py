"""`CacheWrite` as a TensorRT plugin: its output is the cache itself."""

from __future__ import annotations

from engram_trt.plugins.cache_write.launch import PLANNER
from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.trt_contract import OpPlugin


def needs_variant(variant: Variant, attributes: Attributes) -> bool:
    """Rows of any width may come, but only in the node's mode."""
    return dict(variant.constants)["MODE"] == attributes["mode"]


PLUGIN = OpPlugin(planner=PLANNER, needs_variant=needs_variant)
