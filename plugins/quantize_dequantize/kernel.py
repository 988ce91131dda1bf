"""Triton kernel of `QuantizeDequantize`."""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.rounding import cast_to_dtype, quantize_dequantize_groups


@triton.jit(do_not_specialize=["num_groups"])
def quantize_dequantize_kernel(
    x,
    y,
    num_groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y[num_groups, GROUP] = round trip of x[num_groups, GROUP] through FORMAT."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    offset = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (group < num_groups)[:, None]
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    rounded = quantize_dequantize_groups(values, FORMAT)
    tl.store(y + offset, cast_to_dtype(rounded, y.dtype.element_ty, INTERPRET), mask=mask)
