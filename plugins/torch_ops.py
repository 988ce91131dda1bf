"""Registers every torch op of the package: importing this module is enough to trace or load a stage."""

from engram_trt.plugins import primitives
from engram_trt.plugins.cache_write import torch_op as cache_write
from engram_trt.plugins.engram_gather import torch_op as engram_gather
from engram_trt.plugins.engram_hash import torch_op as engram_hash
from engram_trt.plugins.hyper_connection_mix import torch_op as hyper_connection_mix
from engram_trt.plugins.indexer import torch_op as indexer
from engram_trt.plugins.moe_expert_outputs import torch_op as moe_expert_outputs
from engram_trt.plugins.moe_experts import torch_op as moe_experts
from engram_trt.plugins.quantize_dequantize import torch_op as quantize_dequantize
from engram_trt.plugins.sparse_attention import torch_op as sparse_attention

__all__ = [
    "cache_write",
    "engram_gather",
    "engram_hash",
    "hyper_connection_mix",
    "indexer",
    "moe_expert_outputs",
    "moe_experts",
    "primitives",
    "quantize_dequantize",
    "sparse_attention",
]
