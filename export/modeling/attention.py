"""Attention of every kind: window, compressed source, reader, re-index (spec 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compressor import Compressor, entry_positions
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.indexer import Indexer
from engram_trt.export.modeling.layers import Linear, RMSNorm, parameter
from engram_trt.export.modeling.rotary import Table, inverse_frequencies, rotary_table, rotate
from engram_trt.plugins.cache_write.spec import APPEND, RING
from engram_trt.plugins.cache_write.torch_op import cache_write
from engram_trt.plugins.primitives import floor_divide
from engram_trt.plugins.quantize_dequantize.spec import FP4_E4M3_16, FP8_E8M0_32
from engram_trt.plugins.quantize_dequantize.torch_op import round_rows
from engram_trt.plugins.sparse_attention.torch_op import sparse_attention


class Attention(nn.Module):
    """One K = V row per token for all heads; low-rank queries; grouped low-rank output.

    Every cache is written before it is read. What a layer owns is decided by its `LayerConfig`.
    """

    entry_frequencies: Tensor

    def __init__(self, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config, self.layer, self.compute = config, layer, compute
        heads, width, dtype = config.n_heads, config.head_dim, compute.dtype
        quantised = compute.activation_format
        self.attn_sink = parameter(heads)
        self.wq_a = Linear(config.dim, config.q_lora_rank, dtype, quantised)
        self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * width, dtype, quantised)
        self.wkv = Linear(config.dim, width, dtype, quantised)
        self.kv_norm = RMSNorm(width, config.norm_eps)
        # [groups * o_lora_rank, heads/groups * head_dim], as stored: one matrix per group of heads.
        self.wo_a = Linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank, dtype)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.dim, dtype, quantised)
        if layer.is_kv_source:
            self.compressor = Compressor(config, compute, layer.compress_ratio)
            if layer.compress_ratio > 1:
                frequencies = inverse_frequencies(config, layer.compress_ratio)
                self.register_buffer("entry_frequencies", frequencies, persistent=False)
        if layer.is_index_source:
            self.indexer = Indexer(config, layer, compute)

    def forward(self, attn_in: Tensor, table: Table, inputs: dict[str, Tensor]) -> Tensor:
        """Attention output; `inputs` receives updated caches and published lists under their own names.

        Args:
            attn_in: [batch, tokens, dim].
            table: rotary table at the tokens' positions.
            inputs: the stage's tensors (see `stages/block.py` for the table).

        Returns:
            [batch, tokens, dim].
        """
        config, start = self.config, inputs["start_positions"]
        q_latent = self.q_norm(self.wq_a(attn_in))
        q = rotate(self.wq_b(q_latent).unflatten(-1, (config.n_heads, config.head_dim)), table)
        row = self.rounded(rotate(self.kv_norm(self.wkv(attn_in)), table), FP8_E8M0_32)
        inputs["window_kv"] = cache_write(inputs["window_kv"], row, start, RING)
        if self.layer.is_kv_source:
            self.write_entries(attn_in, table, inputs)
        if self.layer.is_index_source:
            self.publish_lists(attn_in, q_latent, table, inputs)
        output = sparse_attention(
            q,
            inputs["window_kv"],
            start,
            self.attn_sink,
            inputs.get("compressed_kv"),
            inputs.get("topk_indices"),
            config.window_size,
            config.head_dim**-0.5,
        )
        return self.project(rotate(output, table, inverse=True))

    def rounded(self, x: Tensor, format: int) -> Tensor:
        """Round a cached row to its format, if caches are quantised."""
        return round_rows(x, format) if self.compute.cache_quantization else x

    def write_entries(self, attn_in: Tensor, table: Table, inputs: dict[str, Tensor]) -> None:
        """Compress this step's tokens and write the entries and their index keys."""
        start, ratio = inputs["start_positions"], self.layer.compress_ratio
        latent = self.compressor(attn_in, start, inputs)
        if ratio > 1:
            table = rotary_table(entry_positions(start, attn_in.shape[1], ratio), self.entry_frequencies)
        first_entry = start if ratio == 1 else floor_divide(start, ratio)
        keys = self.indexer.keys(latent, table)
        entries = self.rounded(rotate(latent, table), FP4_E4M3_16)
        inputs["index_keys"] = cache_write(inputs["index_keys"], keys, first_entry, APPEND)
        inputs["compressed_kv"] = cache_write(inputs["compressed_kv"], entries, first_entry, APPEND)

    def publish_lists(self, attn_in: Tensor, q_latent: Tensor, table: Table, inputs: dict[str, Tensor]) -> None:
        """Select entries and publish the list (and candidate blocks) for this layer and its readers."""
        topk_indices, candidate_blocks = self.indexer(
            attn_in,
            q_latent,
            table,
            inputs["index_keys"],
            inputs["start_positions"],
            inputs[f"visible_entries_r{self.layer.compress_ratio}"],
            inputs.get("candidate_blocks"),
        )
        inputs["topk_indices"] = topk_indices
        if candidate_blocks is not None:
            inputs["candidate_blocks"] = candidate_blocks

    def project(self, output: Tensor) -> Tensor:
        """Grouped low-rank output projection: [batch, tokens, heads, head_dim] -> [batch, tokens, dim]."""
        config = self.config
        batch, tokens = output.shape[:2]
        grouped = output.reshape(batch * tokens, config.o_groups, -1).transpose(0, 1)
        matrices = torch.unflatten(self.wo_a.weight, 0, (config.o_groups, config.o_lora_rank))
        low_rank = torch.matmul(grouped, matrices.transpose(1, 2)).transpose(0, 1)
        return self.wo_b(low_rank.reshape(batch, tokens, -1))
