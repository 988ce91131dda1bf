"""`torch.ops.engram.indexer` and `indexer_candidate_source`: the reference, opaque to a trace.

Both become the ONNX node `Indexer`; the second has its second output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.indexer import reference
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, SPEC
from engram_trt.plugins.kernels.dispatch import launch_on_cuda


@torch.library.custom_op("engram::indexer", mutates_args=())
def indexer(
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    start_positions: Tensor,
    visible_entries: Tensor,
    candidate_blocks: Tensor | None,
    compress_ratio: int,
    index_topk: int,
    role: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> Tensor:
    """See `reference.indexer`; for the roles that publish no candidate blocks."""
    if index_q.is_cuda:
        tensors = (index_q, index_weights, index_keys, start_positions, visible_entries, candidate_blocks)
        attributes = (compress_ratio, index_topk, role, candidate_topk_blocks, candidate_block_size)
        return launch_on_cuda(SPEC, tensors, attributes)[0]
    topk_indices, _ = reference.indexer(
        index_q,
        index_weights,
        index_keys,
        start_positions,
        visible_entries,
        candidate_blocks,
        compress_ratio,
        index_topk,
        role,
        candidate_topk_blocks,
        candidate_block_size,
    )
    return topk_indices


@indexer.register_fake
def _(
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    start_positions: Tensor,
    visible_entries: Tensor,
    candidate_blocks: Tensor | None,
    compress_ratio: int,
    index_topk: int,
    role: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> Tensor:
    return index_q.new_empty((*index_q.shape[:2], index_topk), dtype=torch.int32)


@torch.library.custom_op("engram::indexer_candidate_source", mutates_args=())
def indexer_candidate_source(
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    start_positions: Tensor,
    visible_entries: Tensor,
    compress_ratio: int,
    index_topk: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> tuple[Tensor, Tensor]:
    """See `reference.indexer`; top-k and candidate blocks."""
    if index_q.is_cuda:
        chosen, published = launch_on_cuda(
            SPEC,
            (index_q, index_weights, index_keys, start_positions, visible_entries),
            (compress_ratio, index_topk, CANDIDATE_SOURCE, candidate_topk_blocks, candidate_block_size),
        )
        return chosen, published
    topk_indices, blocks = reference.indexer(
        index_q,
        index_weights,
        index_keys,
        start_positions,
        visible_entries,
        None,
        compress_ratio,
        index_topk,
        CANDIDATE_SOURCE,
        candidate_topk_blocks,
        candidate_block_size,
    )
    if blocks is None:
        raise RuntimeError("a candidate source published no blocks")
    return topk_indices, blocks


@indexer_candidate_source.register_fake
def _(
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    start_positions: Tensor,
    visible_entries: Tensor,
    compress_ratio: int,
    index_topk: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
) -> tuple[Tensor, Tensor]:
    rows = index_q.shape[:2]
    return (
        index_q.new_empty((*rows, index_topk), dtype=torch.int32),
        index_q.new_empty((*rows, candidate_topk_blocks), dtype=torch.int32),
    )
