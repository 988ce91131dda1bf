"""`torch.ops.engram.engram_gather`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.engram_gather import reference
from engram_trt.plugins.engram_gather.spec import SPEC
from engram_trt.plugins.float_tables import torch_dtype
from engram_trt.plugins.kernels.dispatch import launch_on_cuda


@torch.library.custom_op("engram::engram_gather", mutates_args=())
def engram_gather(engram_ids: Tensor, engram_rows: Tensor, engram_scales: Tensor, out_dtype: int) -> Tensor:
    """See `reference.engram_gather`."""
    if engram_rows.is_cuda:
        return launch_on_cuda(SPEC, (engram_ids, engram_rows, engram_scales), (out_dtype,))[0]
    return reference.engram_gather(engram_ids, engram_rows, engram_scales, out_dtype)


@engram_gather.register_fake
def _(engram_ids: Tensor, engram_rows: Tensor, engram_scales: Tensor, out_dtype: int) -> Tensor:
    batch, tokens, columns = engram_ids.shape
    shape = (batch, tokens, columns * engram_rows.shape[1])
    return engram_rows.new_empty(shape, dtype=torch_dtype(out_dtype))
