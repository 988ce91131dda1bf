"""The torch reference of a custom-op node, called with the node's own inputs and attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_trt.plugins import torch_ops
from engram_trt.plugins.indexer import reference as indexer_reference
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER
from engram_trt.plugins.registry import spec_of
from engram_trt.runtime.stage_runners.contract import Array

TORCH_NAMES: Mapping[str, str] = {
    "engram_gather": "EngramGather",
    "engram_hash": "EngramHash",
    "hyper_connection_mix": "HyperConnectionMix",
    "indexer": "Indexer",
    "indexer_candidate_source": "Indexer",
    "moe_expert_outputs": "MoEExpertOutputs",
    "moe_experts": "MoEExperts",
    "quantize_dequantize": "QuantizeDequantize",
    "sparse_attention": "SparseAttention",
}
"""torch op -> the op it is; the write of a cache happens in place in eager mode and has no op there."""


def _cache_write(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    return torch_ops.cache_write.cache_write(cache.clone(), update, write_positions, mode)


def _indexer(*arguments: Any) -> Any:
    index_q, weights, keys, start, visible, _, ratio, topk, role, blocks, size = arguments
    if role == CANDIDATE_SOURCE:
        shared = (index_q, weights, keys, start, visible, ratio, topk, blocks, size)
        return torch_ops.indexer.indexer_candidate_source(*shared)
    return torch_ops.indexer.indexer(*arguments)


def _function(op_type: str) -> Callable[..., Any]:
    """What the eager modules call for an op, looked up now and not at import."""
    table: dict[str, Callable[..., Any]] = {
        "CacheWrite": _cache_write,
        "EngramGather": torch_ops.engram_gather.engram_gather,
        "EngramHash": torch_ops.engram_hash.engram_hash,
        "HyperConnectionMix": torch_ops.hyper_connection_mix.hyper_connection_mix,
        "Indexer": _indexer,
        "MoEExpertOutputs": torch_ops.moe_expert_outputs.moe_expert_outputs,
        "MoEExperts": torch_ops.moe_experts.moe_experts,
        "QuantizeDequantize": torch_ops.quantize_dequantize.quantize_dequantize,
        "SparseAttention": torch_ops.sparse_attention.sparse_attention,
    }
    return table[op_type]


def as_tensor(values: Array) -> Tensor:
    """A tensor over an array's memory; a mapped table stays mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only arrays: nothing here writes to an input
        return torch.from_numpy(np.asarray(values))


@torch.no_grad()
def reference_outputs(
    op_type: str, inputs: Sequence[Array | None], attributes: Mapping[str, int | float]
) -> list[Array]:
    """What the reference computes for a node.

    Args:
        op_type: of the node.
        inputs: in node order, None for an absent one.
        attributes: of the node, by name.

    Returns:
        outputs in node order.
    """
    spec = spec_of(op_type)
    tensors = [None if value is None else as_tensor(value) for value in inputs]
    tensors += [None] * (len(spec.inputs) - len(tensors))
    results = _function(op_type)(*tensors, *(attributes[name] for name in spec.attribute_names))
    parts = results if isinstance(results, tuple | list) else (results,)
    return [part.float().numpy() if part.dtype == torch.bfloat16 else part.numpy() for part in parts]


@torch.no_grad()
def indexer_scores(inputs: Sequence[Array | None], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Scores an `Indexer` node chose by, under the names of the probes; its inputs are as in `reference_outputs`."""
    tensors = [None if value is None else as_tensor(value) for value in inputs]
    queries, weights, keys, start, entries = tensors[:5]
    if queries is None or weights is None or keys is None or start is None or entries is None:
        return {}
    visible = indexer_reference.visible_counts(start, queries.shape[1], int(attributes["compress_ratio"]))
    scores = indexer_reference.index_scores(queries, weights, keys, visible, entries)
    size, found = int(attributes["candidate_block_size"]), {}
    if attributes["role"] == CANDIDATE_SOURCE:
        found["block_scores"] = indexer_reference.candidate_block_scores(scores, visible, size).numpy()
    candidates = tensors[5] if len(tensors) > 5 else None
    if attributes["role"] == CANDIDATE_USER and candidates is not None:
        scores = indexer_reference.inside_candidates(scores, candidates, size)
    found["index_scores"] = scores.numpy()
    return found
