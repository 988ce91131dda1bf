"""Compressor: one latent per group of tokens, for compressed rows and index keys (spec 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import Linear, RMSNorm
from engram_trt.export.modeling.probe import probe
from engram_trt.plugins.cache_write.spec import RING
from engram_trt.plugins.cache_write.torch_op import cache_write
from engram_trt.plugins.primitives import floor_divide, gather_rows, ring_slots


class Compressor(nn.Module):
    """Latents of the groups a step touches, the incomplete last one included.

    Ratio 1 is one projection a token. Above, the members of a group are pooled by a softmax over their scores,
    channel by channel, in float32; projections and scores of recent tokens live in two rings, so that a group
    may straddle steps and a rolled-back step leaves its open group intact.
    """

    def __init__(self, config: ModelConfig, compute: ComputeConfig, compress_ratio: int) -> None:
        super().__init__()
        self.ratio = compress_ratio
        dtype = compute.dtype if compress_ratio == 1 else torch.float32
        self.wkv = Linear(config.dim, config.head_dim, dtype)
        if compress_ratio > 1:
            self.wgate = Linear(config.dim, config.head_dim, dtype)
        self.norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, attn_in: Tensor, start_positions: Tensor, states: dict[str, Tensor]) -> Tensor:
        """Latents before rotation and rounding.

        Args:
            attn_in: [batch, tokens, dim].
            start_positions: [batch] int64.
            states: `kv_state` and `score_state`, [batch, state_ring, head_dim] float32, when the ratio is above
                1; replaced by their updated versions.

        Returns:
            [batch, groups, head_dim]: entry start//ratio + i, of which only complete ones are ever visible;
            groups = tokens for ratio 1, else tokens//ratio + 1.
        """
        if self.ratio == 1:
            latent = self.norm(self.wkv(attn_in))
        else:
            kv = self.write_state(states, "kv_state", self.wkv(attn_in), start_positions)
            score = self.write_state(states, "score_state", self.wgate(attn_in), start_positions)
            positions = entry_positions(start_positions, attn_in.shape[1], self.ratio)
            pooled = self.pool(kv, score, positions)
            latent = self.norm(pooled.to(attn_in.dtype))
        probe("latent", latent)
        return latent

    @staticmethod
    def write_state(states: dict[str, Tensor], name: str, update: Tensor, start_positions: Tensor) -> Tensor:
        """Write this step's tokens into a ring and return it."""
        states[name] = cache_write(states[name], update, start_positions, RING)
        return states[name]

    def pool(self, kv: Tensor, score: Tensor, positions: Tensor) -> Tensor:
        """Softmax-weighted sum of each group's members.

        Args:
            kv, score: [batch, state_ring, head_dim] float32.
            positions: [batch, groups] int64, first position of each group.

        Returns:
            [batch, groups, head_dim] float32.
        """
        members = positions.unsqueeze(-1) + torch.arange(self.ratio, device=kv.device)
        slots = ring_slots(members, kv)
        weights = torch.softmax(gather_rows(score, slots), dim=2)
        return (gather_rows(kv, slots) * weights).sum(dim=2)


def entry_positions(start_positions: Tensor, tokens: int, ratio: int) -> Tensor:
    """Position (of the first token) of each entry a step writes.

    Args:
        start_positions: [batch] int64.
        tokens: tokens in the step.
        ratio: tokens per entry.

    Returns:
        [batch, groups] int64.
    """
    groups = tokens if ratio == 1 else tokens // ratio + 1
    first = start_positions if ratio == 1 else floor_divide(start_positions, ratio)
    return (first.unsqueeze(1) + torch.arange(groups, device=start_positions.device)) * ratio
