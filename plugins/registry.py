"""Every custom op of the package."""

from __future__ import annotations

from engram_trt.plugins.cache_write.spec import SPEC as CACHE_WRITE
from engram_trt.plugins.engram_gather.spec import SPEC as ENGRAM_GATHER
from engram_trt.plugins.engram_hash.spec import SPEC as ENGRAM_HASH
from engram_trt.plugins.hyper_connection_mix.spec import SPEC as HYPER_CONNECTION_MIX
from engram_trt.plugins.indexer.spec import SPEC as INDEXER
from engram_trt.plugins.moe_expert_outputs.spec import SPEC as MOE_EXPERT_OUTPUTS
from engram_trt.plugins.moe_experts.spec import SPEC as MOE_EXPERTS
from engram_trt.plugins.quantize_dequantize.spec import SPEC as QUANTIZE_DEQUANTIZE
from engram_trt.plugins.sparse_attention.spec import SPEC as SPARSE_ATTENTION
from engram_trt.plugins.spec import PluginSpec

SPECS: tuple[PluginSpec, ...] = (
    CACHE_WRITE,
    ENGRAM_GATHER,
    ENGRAM_HASH,
    HYPER_CONNECTION_MIX,
    INDEXER,
    MOE_EXPERT_OUTPUTS,
    MOE_EXPERTS,
    QUANTIZE_DEQUANTIZE,
    SPARSE_ATTENTION,
)


def spec_of(op_type: str) -> PluginSpec:
    """The contract of one op. Raises KeyError for a name that is not ours."""
    return {spec.name: spec for spec in SPECS}[op_type]
