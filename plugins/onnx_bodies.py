"""Which folder makes the function body of which op."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from engram_trt.plugins.cache_write import onnx_op as cache_write
from engram_trt.plugins.engram_gather import onnx_op as engram_gather
from engram_trt.plugins.engram_hash import onnx_op as engram_hash
from engram_trt.plugins.hyper_connection_mix import onnx_op as hyper_connection_mix
from engram_trt.plugins.indexer import onnx_op as indexer
from engram_trt.plugins.moe_expert_outputs import onnx_op as moe_expert_outputs
from engram_trt.plugins.moe_experts import onnx_op as moe_experts
from engram_trt.plugins.onnx_functions import NodeVariant
from engram_trt.plugins.quantize_dequantize import onnx_op as quantize_dequantize
from engram_trt.plugins.sparse_attention import onnx_op as sparse_attention

FunctionMaker = Callable[[NodeVariant, str], onnx.FunctionProto]

FUNCTION_MAKERS: Mapping[str, FunctionMaker] = {
    "CacheWrite": cache_write.function,
    "EngramGather": engram_gather.function,
    "EngramHash": engram_hash.function,
    "HyperConnectionMix": hyper_connection_mix.function,
    "Indexer": indexer.function,
    "MoEExpertOutputs": moe_expert_outputs.function,
    "MoEExperts": moe_experts.function,
    "QuantizeDequantize": quantize_dequantize.function,
    "SparseAttention": sparse_attention.function,
}
