"""Scratch memory of a stage: of our plugins exactly, of everything else by its largest tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, ITEM_BYTES, StageSpec
from engram_trt.export.stages.split_block import EXPERT_SUM, has_attention
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, PLAIN, SPEC
from engram_trt.plugins.indexer.trt_plugin import PLUGIN as INDEXER
from engram_trt.plugins.kernels.plan import TensorInfo

PLANNED_SM = 90
"""Compute capability whose kernels the workspace is asked for; others need the same within a few KiB."""

FLOAT_BYTES = 4
ARENA_GROWTH = 2
"""ONNX Runtime's arena grows by doubling, and keeps what earlier, smaller steps took."""


def indexer_workspace(stage: StageSpec, config: ModelConfig, dtype: str, sizes: Mapping[str, int], *, gpu: bool) -> int:
    """Scratch bytes of the index selection of one stage; 0 where it has none.

    On a GPU it is the plugin's own figure, bounded whatever the context. In ONNX Runtime the op's body holds
    products, weighted products and scores of all tokens and heads at once.

    Args:
        stage: the stage.
        config, dtype: the model, and the stages' dtype.
        sizes: value of every symbol in a step.
        gpu: which of the two.
    """
    layer = None if stage.layer_id is None else config.layer(stage.layer_id)
    if layer is None or not layer.is_index_source or not has_attention(stage):
        return 0
    batch, tokens = sizes["batch"], sizes["tokens"]
    heads, width = config.index_n_heads, config.index_head_dim
    visible = sizes[f"visible_r{layer.compress_ratio}"]
    if not gpu:
        return ARENA_GROWTH * batch * tokens * visible * (2 * heads + 2) * FLOAT_BYTES
    blocks = config.candidate_topk_blocks, config.candidate_block_size
    return _plugin_workspace(
        (batch, tokens, heads, width),
        (visible, sizes[f"entries_r{layer.compress_ratio}"]),
        (layer.compress_ratio, config.index_topk, _role(layer), *blocks),
        dtype,
    )


@cache
def _plugin_workspace(
    queries: tuple[int, int, int, int], entries: tuple[int, int], attributes: tuple[int, ...], dtype: str
) -> int:
    """Of the plugin: shape of the queries, entries scored and entries held, attributes in the contract's order."""
    batch, tokens, heads, width = queries
    named = dict(zip(SPEC.attribute_names, attributes, strict=True))
    inputs = {
        "index_q": TensorInfo(shape=queries, dtype=dtype),
        "index_weights": TensorInfo(shape=(batch, tokens, heads), dtype=dtype),
        "index_keys": TensorInfo(shape=(batch, entries[1], width), dtype=dtype),
        "start_positions": TensorInfo(shape=(batch,), dtype="int64"),
        "visible_entries": TensorInfo(shape=(entries[0],), dtype="int64"),
    }
    if named["role"] == CANDIDATE_USER:
        blocks = (batch, tokens, named["candidate_topk_blocks"])
        inputs["candidate_blocks"] = TensorInfo(shape=blocks, dtype="int32")
    return INDEXER.workspace_bytes(inputs, named, (PLANNED_SM,))


def _role(layer: LayerConfig) -> int:
    if layer.is_candidate_source:
        return CANDIDATE_SOURCE
    return CANDIDATE_USER if layer.uses_candidates else PLAIN


def intermediate_bytes(stage: StageSpec, config: ModelConfig, dtype: str, rows: int) -> int:
    """An estimate of what a stage holds between its inputs and outputs: its largest tensors that live together.

    In a block these are queries and attention output; the head's are one row of the vocabulary per token asked
    for, counted among its outputs.

    Args:
        stage: the stage.
        config, dtype: the model, and the stages' dtype.
        rows: tokens of the step, over all sequences.
    """
    if stage.layer_id is None or stage.kind == EXPERT_SUM:
        return 0
    item = ITEM_BYTES[dtype]
    attention = 2 * config.n_heads * config.head_dim * item
    streams = config.hc_mult * config.dim * (item + FLOAT_BYTES)
    experts = config.n_activated_experts * (config.dim + 2 * config.moe_inter_dim) * FLOAT_BYTES
    if stage.kind == EXPERTS:
        return rows * experts
    return rows * (max(attention, experts) + streams)
