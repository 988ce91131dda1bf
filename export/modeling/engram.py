"""Engram: an n-gram lookup written into every stream, gated by how well it fits the stream (spec 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import Linear, parameter, rms_normalize
from engram_trt.export.modeling.probe import probe
from engram_trt.plugins.engram_gather.torch_op import engram_gather
from engram_trt.plugins.float_tables import onnx_data_type

GATE_CLAMP = 1e-6
"""Smallest |match| before the square root; separate from the norms' epsilon."""


class Engram(nn.Module):
    """Gather table rows, project them to one key per stream and one value, add the gated value to each stream."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.dim, self.hc_mult, self.eps = config.dim, config.hc_mult, config.norm_eps
        self.out_dtype = onnx_data_type(compute.dtype)
        features = config.engram_columns * config.engram_head_dim
        self.wkv = Linear(features, (self.hc_mult + 1) * self.dim, compute.dtype, compute.activation_format)
        self.q_weight = parameter(self.hc_mult, self.dim)
        self.k_weight = parameter(self.hc_mult, self.dim)

    def forward(
        self, hidden_states: Tensor, ids: Tensor, rows: Tensor, scales: Tensor, image_mask: Tensor | None
    ) -> Tensor:
        """Streams after the write.

        Args:
            hidden_states: [batch, tokens, hc_mult, dim].
            ids: [batch, tokens, columns] int64 rows of this layer's table.
            rows, scales: the table as int8 views.
            image_mask: [batch, tokens] bool; the gate is shut at True. None where the model has no vision.

        Returns:
            [batch, tokens, hc_mult, dim].
        """
        projected = self.wkv(engram_gather(ids, rows, scales, self.out_dtype)).to(torch.float32)
        keys, value = torch.split(projected, [self.hc_mult * self.dim, self.dim], dim=-1)
        keys = torch.unflatten(keys, -1, (self.hc_mult, self.dim))
        streams = hidden_states.to(torch.float32)
        gate = self.gate(streams, keys).unsqueeze(-1)
        if image_mask is not None:
            gate = torch.where(image_mask.reshape(*image_mask.shape, 1, 1), 0, gate)
        written = (streams + gate * value.unsqueeze(2)).to(hidden_states.dtype)
        probe("engram_out", written)
        return written

    def gate(self, streams: Tensor, keys: Tensor) -> Tensor:
        """Sigmoid of the signed square root of the normalised match, per token and stream.

        Args:
            streams, keys: [batch, tokens, hc_mult, dim] float32; each is normalised over dim alone.

        Returns:
            [batch, tokens, hc_mult] float32.
        """
        ones = torch.ones(self.dim, device=streams.device)
        weight = self.q_weight.to(torch.float32) * self.k_weight.to(torch.float32)
        query = rms_normalize(streams, ones, self.eps) * weight
        match = (query * rms_normalize(keys, ones, self.eps)).sum(dim=-1) * self.dim**-0.5
        root = torch.sqrt(match.abs().clamp(min=GATE_CLAMP))
        return torch.sigmoid(torch.where(match < 0, -root, root))
