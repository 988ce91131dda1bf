"""`torch.ops.engram.quantize_dequantize`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.kernels.dispatch import launch_on_cuda
from engram_trt.plugins.quantize_dequantize import reference
from engram_trt.plugins.quantize_dequantize.spec import SPEC


@torch.library.custom_op("engram::quantize_dequantize", mutates_args=())
def quantize_dequantize(x: Tensor, format: int) -> Tensor:
    """See `reference.quantize_dequantize`."""
    if x.is_cuda:
        return launch_on_cuda(SPEC, (x,), (format,))[0]
    return reference.quantize_dequantize(x, format)


@quantize_dequantize.register_fake
def _(x: Tensor, format: int) -> Tensor:
    return x.new_empty(x.shape)


def round_rows(x: Tensor, format: int) -> Tensor:
    """`quantize_dequantize` for any number of leading axes: the op itself takes rows.

    Args:
        x: [..., width].
        format: a format number of the contract.

    Returns:
        like x.
    """
    if x.dim() == 2:
        return quantize_dequantize(x, format)
    return quantize_dequantize(x.reshape(-1, x.shape[-1]), format).reshape(x.shape)
