"""`Indexer` as a TensorRT plugin: two outputs for a candidate source, one otherwise; a bounded workspace."""

from __future__ import annotations

from collections.abc import Iterable

from engram_trt.plugins.indexer.launch import PLANNER, WORKSPACE_BYTES
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, SPEC
from engram_trt.plugins.indexer.variants import sort_variant
from engram_trt.plugins.kernels.checks import Inputs, info
from engram_trt.plugins.kernels.plan import Variant
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.trt_contract import OpPlugin, with_extents


def num_outputs(attributes: Attributes) -> int:
    """Only a candidate source publishes blocks."""
    return 2 if attributes["role"] == CANDIDATE_SOURCE else 1


def workspace_shapes(inputs: Inputs, attributes: Attributes, sm: int) -> Iterable[Inputs]:
    """All tokens in one row: a chunk then takes as many of them as the bound on the workspace allows."""
    yield inputs
    batch, tokens = info(SPEC.name, inputs, "index_q").shape[:2]
    yield with_extents(SPEC, inputs, {"batch": 1, "tokens": batch * tokens})


def needs_variant(variant: Variant, attributes: Attributes) -> bool:
    """Candidate kernels are for candidate users, the sort in the length of the node's list."""
    if variant.function == "block_scores_kernel":
        return attributes["role"] == CANDIDATE_SOURCE
    if variant.function == "index_scores_kernel":
        return attributes["role"] != CANDIDATE_USER
    if variant.function == "sort_candidates_kernel":
        length = int(attributes["candidate_topk_blocks"])
        return attributes["role"] == CANDIDATE_USER and variant == sort_variant(length)
    return variant.function != "candidate_scores_kernel" or attributes["role"] == CANDIDATE_USER


PLUGIN = OpPlugin(
    planner=PLANNER,
    num_outputs=num_outputs,
    workspace_shapes=workspace_shapes,
    chunk_bytes=WORKSPACE_BYTES,
    needs_variant=needs_variant,
)
