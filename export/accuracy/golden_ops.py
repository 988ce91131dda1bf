"""Which vectors of `ops/` are compared how."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engram_trt.export.accuracy import golden_ops_attention as attention
from engram_trt.export.accuracy import golden_ops_basic as basic
from engram_trt.export.accuracy import golden_ops_ffn as ffn
from engram_trt.export.accuracy import golden_ops_indexer as indexer
from engram_trt.export.accuracy import golden_ops_rounding as rounding
from engram_trt.export.accuracy.golden_folder import SUFFIX, GoldenFolder
from engram_trt.export.accuracy.golden_results import Results, Vectors
from engram_trt.export.accuracy.golden_runner import Runner, runner_for

Compare = Callable[[Vectors, Runner, basic.Meta], None]

COMPARISONS: Mapping[str, Compare] = {
    "candidate_blocks": indexer.compare_candidate_blocks,
    "compressor": attention.compare_compressor,
    "engram": ffn.compare_engram,
    "hc_block": basic.compare_hc_block,
    "hc_split_sinkhorn": basic.compare_hc_split_sinkhorn,
    "head": basic.compare_head,
    "indexer": indexer.compare_indexer,
    "moe": ffn.compare_moe,
    "quant": rounding.compare_quant,
    "quant_linear": rounding.compare_quant_linear,
    "rmsnorm": basic.compare_rmsnorm,
    "rope": basic.compare_rope,
    "sparse_attn": attention.compare_sparse_attn,
    "window_idxs": basic.compare_window_idxs,
}


def op_file(name: str) -> str:
    """Relative path of an op's vectors."""
    return f"ops/{name}{SUFFIX}"


def compare_op(folder: GoldenFolder, name: str, backend: str) -> Results:
    """Compare one file of `ops/`; CheckpointError if its cases are incomplete."""
    results = Results()
    vectors = folder.vectors(op_file(name), backend, results)
    described = folder.json("ops/index.json").get(name, {})
    meta = described.get("meta", {}) if isinstance(described, dict) else {}
    COMPARISONS[name](vectors, runner_for(backend), meta if isinstance(meta, dict) else {})
    vectors.finish()
    return results
