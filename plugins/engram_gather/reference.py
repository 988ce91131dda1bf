"""Reference of `EngramGather`."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.engram_gather.spec import GROUP
from engram_trt.plugins.float_tables import E4M3_TABLE, E8M0_TABLE, torch_dtype
from engram_trt.plugins.primitives import take


def engram_gather(engram_ids: Tensor, engram_rows: Tensor, engram_scales: Tensor, out_dtype: int) -> Tensor:
    """Dequantised rows: fp8 * 2^(e-127) of the feature's group of 32 (spec 3). Exact.

    Args:
        engram_ids: [batch, tokens, columns] int64.
        engram_rows: [rows, engram_head_dim] int8 view of E4M3 bytes.
        engram_scales: [rows, engram_head_dim/32] int8 view of E8M0 bytes.
        out_dtype: ONNX data type of the result.

    Returns:
        [batch, tokens, columns * engram_head_dim].
    """
    # A negative int8 indexes from the table's end, which is where that byte's value stands.
    values = take(E4M3_TABLE.to(engram_rows.device), take(engram_rows, engram_ids).to(torch.int32))
    scales = take(E8M0_TABLE.to(engram_rows.device), take(engram_scales, engram_ids).to(torch.int32))
    rows = values.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)
    return rows.flatten(2).to(torch_dtype(out_dtype))
