"""The launch planner of every op."""

from __future__ import annotations

from engram_trt.plugins.cache_write.launch import PLANNER as CACHE_WRITE
from engram_trt.plugins.engram_gather.launch import PLANNER as ENGRAM_GATHER
from engram_trt.plugins.engram_hash.launch import PLANNER as ENGRAM_HASH
from engram_trt.plugins.hyper_connection_mix.launch import PLANNER as HYPER_CONNECTION_MIX
from engram_trt.plugins.indexer.launch import PLANNER as INDEXER
from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Planner
from engram_trt.plugins.moe_expert_outputs.launch import PLANNER as MOE_EXPERT_OUTPUTS
from engram_trt.plugins.moe_experts.launch import PLANNER as MOE_EXPERTS
from engram_trt.plugins.quantize_dequantize.launch import PLANNER as QUANTIZE_DEQUANTIZE
from engram_trt.plugins.sparse_attention.launch import PLANNER as SPARSE_ATTENTION

PLANNERS: tuple[Planner, ...] = (
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


def planner_of(op_type: str) -> Planner:
    """The planner of one op. Raises KeyError for a name that is not ours."""
    return {planner.spec.name: planner for planner in PLANNERS}[op_type]


def all_variants(sm: int, op_type: str = "") -> tuple[Variant, ...]:
    """Every variant the launcher can choose on a compute capability, each once; for one op, or for all."""
    planners = [planner for planner in PLANNERS if op_type in ("", planner.spec.name)]
    found = (variant for planner in planners for variant in planner.variants(sm))
    return tuple(dict.fromkeys(found))
