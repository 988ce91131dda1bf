"""`EngramGather` as a TensorRT plugin."""

from __future__ import annotations

from collections.abc import Mapping

from engram_trt.plugins.engram_gather.launch import DTYPE_OF_ONNX, PLANNER
from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.trt_contract import OpPlugin


def output_types(attributes: Attributes) -> Mapping[str, str]:
    """The dtype of the embeddings is an attribute."""
    return {"T": DTYPE_OF_ONNX[int(attributes["out_dtype"])]}


def needs_variant(variant: Variant, attributes: Attributes) -> bool:
    """A node's table is one tensor; kernels over shards serve the store."""
    return variant.function == "engram_gather_kernel"


PLUGIN = OpPlugin(
    planner=PLANNER,
    products={"features": ("columns", "engram_head_dim")},
    output_types=output_types,
    needs_variant=needs_variant,
)
