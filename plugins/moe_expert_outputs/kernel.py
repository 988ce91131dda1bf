"""Triton kernel of `MoEExpertOutputs`: what comes before the grouped products of `MoEExperts`."""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.rounding import cast_to_dtype
from engram_trt.plugins.moe_experts.kernel import prepare_row


@triton.jit(do_not_specialize=["dim", "experts", "activated"])
def prepare_rows_kernel(
    ffn_in,
    expert_ids,
    activations,
    expert_outputs,
    dim,
    experts,
    activated,
    PREPARE: tl.constexpr,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_DIM columns of one row: its activations, and zeros for the slots whose expert is not bound."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    zeros = cast_to_dtype(tl.zeros([BLOCK_DIM], tl.float32), expert_outputs.dtype.element_ty, INTERPRET)
    for slot in range(activated):
        pair = row * activated + slot
        expert = tl.load(expert_ids + pair)
        is_here = (expert >= 0) & (expert < experts)
        tl.store(expert_outputs + pair * dim + column, zeros, mask=(column < dim) & (is_here == 0))
    if PREPARE:
        prepare_row(row, block, ffn_in, activations, dim, PACKED, FORMAT, GROUP, BLOCK_DIM, INTERPRET)
