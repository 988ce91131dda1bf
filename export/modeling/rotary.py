"""Rotary position embedding on adjacent pairs of the last channels (spec 5.1).

A table covers every rotated channel: `cos` repeats each angle for both members of a pair, `sin` carries the sign
the member needs (minus, plus), so that a rotation is `x * cos + swap(x) * sin`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig

Table = tuple[Tensor, Tensor]


def inverse_frequencies(config: ModelConfig, compress_ratio: int) -> Tensor:
    """Angle per position of each pair, in the reference's float32 order of operations.

    Args:
        config: the model.
        compress_ratio: 0 for window layers (plain theta); above, the compressed theta with YaRN if it is on.

    Returns:
        [rope_head_dim/2] float32.
    """
    width = config.rope_head_dim
    theta = config.compress_rope_theta if compress_ratio else config.rope_theta
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / (theta**exponents)
    if not compress_ratio or not config.has_yarn:
        return frequencies

    def corrected(rotations: float) -> float:
        wavelength = config.original_seq_len / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(corrected(config.beta_fast)), 0)
    high = min(math.ceil(corrected(config.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    smooth = 1 - ramp.clamp(0, 1)
    return frequencies / config.rope_factor * (1 - smooth) + frequencies * smooth


def rotary_table(positions: Tensor, frequencies: Tensor) -> Table:
    """cos and signed sin of every rotated channel; the angle is a float32 product, as in the reference.

    Args:
        positions: [batch, tokens] int64.
        frequencies: [rope_head_dim/2] float32.

    Returns:
        cos, sin: [batch, tokens, rope_head_dim] float32.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.stack([cos, cos], dim=-1).flatten(-2), torch.stack([-sin, sin], dim=-1).flatten(-2)


def rotate(x: Tensor, table: Table, inverse: bool = False) -> Tensor:
    """Rotate the last channels in float32 and write them back in x's dtype.

    Args:
        x: [batch, tokens, width] or [batch, tokens, heads, width].
        table: from `rotary_table`.
        inverse: rotate by minus the angle.

    Returns:
        like x.
    """
    cos, sin = table
    width = cos.shape[-1]
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    kept, turned = torch.split(x, [x.shape[-1] - width, width], dim=-1)
    turned = turned.to(torch.float32)
    partner = torch.bitwise_xor(torch.arange(width, device=x.device), 1)
    swapped = turned.index_select(-1, partner)
    rotated = turned * cos - swapped * sin if inverse else turned * cos + swapped * sin
    return torch.cat([kept, rotated.to(x.dtype)], dim=-1)
