"""Linear layers and norms with the published model's rounding points (spec 4, 6.3, 10.15)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram_trt.export.modeling.compute import NO_FORMAT
from engram_trt.plugins.quantize_dequantize.torch_op import round_rows


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An uninitialised weight that is never trained; its values come from a checkpoint."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T, no bias; optionally with the input rounded to a quantised format first.

    Args:
        in_features, out_features: sizes.
        dtype: of the weight; the input is cast to it.
        activation_format: `QuantizeDequantize` format of the input, or `NO_FORMAT`.
    """

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, activation_format: int = NO_FORMAT
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.activation_format = activation_format

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.activation_format != NO_FORMAT:
            x = round_rows(x, self.activation_format)
        return F.linear(x.to(self.weight.dtype), self.weight)


def rms_normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in float32, cast to x's dtype once.

    Uses torch's rms_norm, which exports to RMSNormalization and keeps an epsilon of 1e-20; written out, the
    exporter takes it for zero and drops it, and a zero row turns into NaN.
    """
    return F.rms_norm(x.to(torch.float32), (x.shape[-1],), weight.to(torch.float32), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis.

    Args:
        dim: width.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim] in x's dtype."""
        return rms_normalize(x, self.weight, self.eps)
