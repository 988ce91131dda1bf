"""Indexer: which compressed entries a token attends to (spec 5.5)."""

from __future__ import annotations

from torch import Tensor, nn

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.layers import Linear, RMSNorm
from engram_trt.export.modeling.probe import is_probing, probe
from engram_trt.export.modeling.rotary import Table, rotate
from engram_trt.plugins.indexer import reference
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, PLAIN
from engram_trt.plugins.indexer.torch_op import indexer, indexer_candidate_source
from engram_trt.plugins.quantize_dequantize.spec import FP4_E8M0_32
from engram_trt.plugins.quantize_dequantize.torch_op import round_rows


class Indexer(nn.Module):
    """Queries and head weights of one index source and, where the layer owns entries, their keys."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.cache_quantization = compute.cache_quantization
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * width, compute.dtype, compute.activation_format)
        self.weights_proj = Linear(config.dim, heads, compute.dtype)
        if layer.is_kv_source:
            self.wk = Linear(config.head_dim, width, compute.dtype)
            self.k_norm = RMSNorm(width, config.norm_eps)

    @property
    def role(self) -> int:
        """Role in the candidate stage (see the op's contract)."""
        if self.layer.is_candidate_source:
            return CANDIDATE_SOURCE
        return CANDIDATE_USER if self.layer.uses_candidates else PLAIN

    def keys(self, latent: Tensor, table: Table) -> Tensor:
        """Index keys of this step's entries.

        Args:
            latent: [batch, groups, head_dim] before rotation.
            table: rotary table at the entries' positions.

        Returns:
            [batch, groups, index_head_dim].
        """
        keys = rotate(self.k_norm(self.wk(latent)), table)
        return self.rounded(keys)

    def rounded(self, x: Tensor) -> Tensor:
        """Round queries or keys to FP4 with a scale per 32, if the cache is quantised."""
        return round_rows(x, FP4_E8M0_32) if self.cache_quantization else x

    def forward(
        self,
        attn_in: Tensor,
        q_latent: Tensor,
        table: Table,
        index_keys: Tensor,
        start_positions: Tensor,
        visible_entries: Tensor,
        candidate_blocks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Select entries.

        Args:
            attn_in: [batch, tokens, dim].
            q_latent: [batch, tokens, q_lora_rank].
            table: rotary table at the tokens' positions.
            index_keys: [batch, entries, index_head_dim] of the layer's kv source.
            start_positions, visible_entries, candidate_blocks: as in the op's contract.

        Returns:
            topk_indices, and candidate blocks if this layer is the candidate source.
        """
        config = self.config
        queries = self.wq_b(q_latent).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        queries = self.rounded(rotate(queries, table))
        weights = self.weights_proj(attn_in) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        shared = (queries, weights, index_keys, start_positions, visible_entries)
        sizes = (self.layer.compress_ratio, config.index_topk)
        blocks = (config.candidate_topk_blocks, config.candidate_block_size)
        if is_probing():
            self.probe_scores(*shared, candidate_blocks)
        if self.role == CANDIDATE_SOURCE:
            topk_indices, chosen_blocks = indexer_candidate_source(*shared, *sizes, *blocks)
            probe("topk", topk_indices)
            probe("candidate_blocks", chosen_blocks)
            return topk_indices, chosen_blocks
        used = candidate_blocks if self.role == CANDIDATE_USER else None
        topk_indices = indexer(*shared, used, *sizes, self.role, *blocks)
        probe("topk", topk_indices)
        return topk_indices, None

    def probe_scores(
        self,
        queries: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        start_positions: Tensor,
        visible_entries: Tensor,
        candidate_blocks: Tensor | None,
    ) -> None:
        """Recompute, for a recorder, the scores that never leave the op."""
        block_size = self.config.candidate_block_size
        visible = reference.visible_counts(start_positions, queries.shape[1], self.layer.compress_ratio)
        scores = reference.index_scores(queries, weights, index_keys, visible, visible_entries)
        if self.role == CANDIDATE_SOURCE:
            probe("block_scores", reference.candidate_block_scores(scores, visible, block_size))
        if self.role == CANDIDATE_USER and candidate_blocks is not None:
            scores = reference.inside_candidates(scores, candidate_blocks, block_size)
        probe("index_scores", scores)
