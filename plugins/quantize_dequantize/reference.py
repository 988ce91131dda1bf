"""Reference of `QuantizeDequantize`: the three rules of spec 6.3, rounding to nearest, ties to even."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.float_tables import E2M1_MAX, E2M1_TABLE, E4M3_MAX, E8M0_BIAS, E8M0_TABLE
from engram_trt.plugins.primitives import take
from engram_trt.plugins.quantize_dequantize.spec import FP4_E4M3_16, FP4_E8M0_32, FP8_E8M0_32, GROUP_OF_FORMAT

FP8_AMAX_FLOOR = 1e-4
FP4_E8M0_AMAX_FLOOR = 6 * 2.0**-126
FP4_E4M3_AMAX_FLOOR = 6 * 2.0**-9


def power_of_two_at_least(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive float32 x in the normal range; exact.

    The logarithm may be off by one step; the two comparisons put it right.
    """
    exponent = torch.ceil(torch.log2(x)).to(torch.int32) + E8M0_BIAS
    power = take(E8M0_TABLE.to(x.device), exponent.clamp(0, 254))
    power = torch.where(power < x, power * 2, power)
    return torch.where(power * 0.5 >= x, power * 0.5, power)


def round_to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value of float32 x, ties to even, as float32; x lies in [-448, 448]."""
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of float32 x, ties to the even code, as float32; x lies in [-6, 6]."""
    magnitude = x.abs()
    # Midpoints between neighbours; at a tie the even code wins, hence > below an even code and >= below an odd.
    code = (
        (magnitude > 0.25).to(torch.int32)
        + (magnitude >= 0.75).to(torch.int32)
        + (magnitude > 1.25).to(torch.int32)
        + (magnitude >= 1.75).to(torch.int32)
        + (magnitude > 2.5).to(torch.int32)
        + (magnitude >= 3.5).to(torch.int32)
        + (magnitude > 5.0).to(torch.int32)
    )
    rounded = take(E2M1_TABLE.to(x.device), code)
    return torch.where(x < 0, -rounded, rounded)


def group_scale(groups: Tensor, format: int) -> Tensor:
    """Scale of each group.

    Args:
        groups: [..., group] float32.
        format: a format number of the contract.

    Returns:
        [..., 1] float32: a power of two, or an E4M3 value for FP4_E4M3_16.
    """
    amax = groups.abs().amax(dim=-1, keepdim=True)
    if format == FP8_E8M0_32:
        inverse = torch.full_like(amax, 1 / E4M3_MAX)
        return power_of_two_at_least(amax.clamp(min=FP8_AMAX_FLOOR) * inverse)
    if format == FP4_E8M0_32:
        inverse = torch.full_like(amax, 1 / E2M1_MAX)
        return power_of_two_at_least(amax.clamp(min=FP4_E8M0_AMAX_FLOOR) * inverse)
    if format == FP4_E4M3_16:
        return round_to_e4m3((amax.clamp(min=FP4_E4M3_AMAX_FLOOR) / E2M1_MAX).clamp(max=E4M3_MAX))
    raise ValueError(f"QuantizeDequantize: format {format} is none of 0, 1, 2")


def quantize_dequantize(x: Tensor, format: int) -> Tensor:
    """Values of x after a round trip through the format, in x's dtype.

    Args:
        x: [..., width]; width is a multiple of the format's group.
        format: a format number of the contract.

    Returns:
        [..., width] in x's dtype.
    """
    groups = torch.unflatten(x.to(torch.float32), -1, (-1, GROUP_OF_FORMAT[format]))
    scale = group_scale(groups, format)
    limit, round_to = (E4M3_MAX, round_to_e4m3) if format == FP8_E8M0_32 else (E2M1_MAX, round_to_e2m1)
    rounded = round_to((groups / scale).clamp(-limit, limit)) * scale
    return rounded.flatten(-2).to(x.dtype)
