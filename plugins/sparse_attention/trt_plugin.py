"""`SparseAttention` as a TensorRT plugin: few tokens need the most scratch memory, for their lists are split."""

from __future__ import annotations

from collections.abc import Iterable

from engram_trt.plugins.kernels.checks import Inputs, info
from engram_trt.plugins.kernels.plan import MULTIPROCESSORS
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.sparse_attention.launch import PLANNER
from engram_trt.plugins.sparse_attention.spec import SPEC
from engram_trt.plugins.trt_contract import OpPlugin, with_extents


def workspace_shapes(inputs: Inputs, attributes: Attributes, sm: int) -> Iterable[Inputs]:
    """Every number of tokens that does not fill the GPU by itself, in one row; above it nothing is split."""
    batch, tokens = info(SPEC.name, inputs, "q").shape[:2]
    yield inputs
    for num_tokens in range(1, min(batch * tokens, MULTIPROCESSORS[sm]) + 1):
        yield with_extents(SPEC, inputs, {"batch": 1, "tokens": num_tokens})


PLUGIN = OpPlugin(planner=PLANNER, workspace_shapes=workspace_shapes)
