"""Faults an implementation of this model has had, or could have, and where a comparison must find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from faults import original
from torch import Tensor

MODELING = "engram_trt.export.modeling."
STAGES = "engram_trt.export.stages."
PLUGINS = "engram_trt.plugins."


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededFault:
    """One fault.

    Args:
        label: what is wrong.
        name: what is replaced.
        make: original -> replacement.
        stage: the stage that must be named first.
        tensor: the tensor that must be named first; any if empty.
        op: what the bisection must name: a label, or a part of it.
        reloads: whether it takes effect only in modules loaded after it was planted.
    """

    label: str
    name: str
    make: Callable[[Any], Any]
    stage: str
    tensor: str = ""
    op: str
    reloads: bool = False

    def replacement(self) -> Any:
        return self.make(original(self.name))


def _transposed_comb(expand: Any) -> Any:
    return lambda output, streams, post, comb: expand(output, streams, post, comb.transpose(2, 3))


def _same_sublayer_mix(forward: Any) -> Any:
    """The experts read with their own mix instead of attention's."""

    def replaced(self: Any, sublayer: str, streams: Tensor) -> Any:
        mixed = forward(self, sublayer, streams)
        if sublayer == "attn":
            self.delayed = forward(self, "ffn", streams)[0]
            return self.delayed, mixed[1], mixed[2]
        return mixed

    return replaced


def _no_inverse(rotate: Any) -> Any:
    return lambda x, table, inverse=False: x if inverse else rotate(x, table)


def _split_halves(rotate: Any) -> Any:
    """The vision tower's pairing, on text."""

    def replaced(x: Tensor, table: Any, inverse: bool = False) -> Tensor:
        cos, sin = table
        width = cos.shape[-1]
        halves = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
        return rotate(x, (cos[..., halves], sin[..., halves]), inverse)

    return replaced


def _compressed_theta_everywhere(frequencies: Any) -> Any:
    return lambda config, ratio: frequencies(config, ratio or 2)


def _no_yarn(frequencies: Any) -> Any:
    def replaced(config: Any, ratio: int) -> Tensor:
        width = config.rope_head_dim
        theta = config.compress_rope_theta if ratio else config.rope_theta
        return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))

    return replaced


def _bias_as_weight(choose: Any) -> Any:
    return lambda scores, bias, *rest: choose(scores + bias, torch.zeros_like(bias), *rest)


def _no_route_scale(choose: Any) -> Any:
    return lambda scores, bias, k, norm, scale: choose(scores, bias, k, norm, 1.0)


def _weights_not_normalised(choose: Any) -> Any:
    return lambda scores, bias, k, norm, scale: choose(scores, bias, k, 0, scale)


def _no_sink(attention: Any) -> Any:
    return lambda q, window, start, sink, *rest: attention(q, window, start, torch.full_like(sink, -1e30), *rest)


def _scaled_sink(attention: Any) -> Any:
    return lambda q, window, start, sink, *rest: attention(q, window, start, sink * rest[-1], *rest)


def _short_window(positions: Any) -> Any:
    """One position too few is seen."""

    def replaced(start: Tensor, tokens: int, window: int) -> Tensor:
        listed = positions(start, tokens, window).clone()
        listed[..., 0] = -1
        return listed

    return replaced


def _stale_slot(write: Any) -> Any:
    """The last row of a step does not arrive in a ring."""

    def replaced(cache: Tensor, update: Tensor, positions: Tensor, mode: int) -> Tensor:
        return write(cache, update[:, :-1] if mode == 1 else update, positions, mode)

    return replaced


def _sees_too_far(visible: Any) -> Any:
    """An entry is visible one token too early."""
    return lambda start, tokens, ratio: visible(start + 1, tokens, ratio)


def _newest_block_not_kept(scores: Any) -> Any:
    def replaced(values: Tensor, visible: Tensor, size: int) -> Tensor:
        return scores(values, torch.zeros_like(visible), size)

    return replaced


def _candidates_ignored(inside: Any) -> Any:
    return lambda scores, blocks, size: scores


def _relu_forgotten(scores: Any) -> Any:
    """Negative dot products count."""

    def replaced(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, entries: Tensor) -> Tensor:
        found = scores(q, weights, keys, visible, entries)
        flipped = scores(-q, -weights, keys, visible, entries)
        return found + torch.where(torch.isfinite(flipped), flipped, 0)

    return replaced


def _narrow_addresses(gather: Any) -> Any:
    """A byte offset of 32 bits: of a sparse table's rows, those behind the border are read from its beginning."""

    def replaced(ids: Tensor, rows: Tensor, scales: Tensor, dtype: int) -> Tensor:
        return gather((ids * rows.shape[1]) % (1 << 18) // rows.shape[1], rows, scales, dtype)

    return replaced


def _swapped_nibbles(dequantize: Any) -> Any:
    def replaced(codes: Tensor, scales: Tensor) -> Tensor:
        values = dequantize(codes, scales)
        return values.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    return replaced


def _no_floor(_clamp: Any) -> float:
    """The square root loses its floor, which a text hardly ever reaches."""
    return 0.0


def _no_swiglu_clamp(swiglu: Any) -> Any:
    return lambda gate, up, routing, limit: swiglu(gate, up, routing, 0.0)


def _unsigned_gate(gate: Any) -> Any:
    return lambda self, streams, keys: gate(self, streams, keys).clamp(min=0.5)


def _wrong_pad(hashed: Any) -> Any:
    return lambda ids, history, multipliers, primes, offsets, pad: hashed(
        ids, history, multipliers, primes, offsets, pad + 1
    )


def _block_flag_not_kept(hashed: Any) -> Any:
    """A blocked look-back does not block the ones behind it: the history's beginning counts as token 0."""
    return lambda ids, history, *rest: hashed(ids, history.clamp(min=0), *rest)


def _stale_history(recent: Any) -> Any:
    """The token cache hands out its ids one step late."""

    def replaced(self: Any, num_rows: int) -> Any:
        return self._ids[:num_rows, self._ids.shape[1] - self.history - 1 : -1]

    return replaced


def _pool_without_softmax(pool: Any) -> Any:
    def replaced(self: Any, kv: Tensor, score: Tensor, positions: Tensor) -> Tensor:
        return pool(self, kv, torch.zeros_like(score), positions)

    return replaced


def _entry_positions_by_index(positions: Any) -> Any:
    """Entries are rotated at their index instead of their first token's position."""
    return lambda start, tokens, ratio: positions(start, tokens, ratio) // ratio * (1 if ratio > 1 else ratio)


def _ten_sinkhorn_rounds(sinkhorn: Any) -> Any:
    return lambda logits, iterations, eps: sinkhorn(logits, 2, eps)


def _post_not_doubled(split: Any) -> Any:
    def replaced(*arguments: Any) -> Any:
        pre, post, comb = split(*arguments)
        return pre, post / 2, comb

    return replaced


def _clamp_below(swiglu: Any) -> Any:
    """The gate is clamped from below as well, and tighter than it should."""
    return lambda gate, up, routing, limit: swiglu(gate.clamp(min=-0.5), up, routing, limit)


def _head_reads_stream_zero(collapse: Any) -> Any:
    return lambda streams, pre: streams[:, :, 0]


def _groups_swapped(project: Any) -> Any:
    def replaced(self: Any, output: Tensor) -> Tensor:
        return project(self, output.flip(2))

    return replaced


def _image_bias_for_text(forward: Any) -> Any:
    def replaced(self: Any, rows: Tensor, mask: Tensor | None) -> Any:
        return forward(self, rows, None if mask is None else ~mask)

    return replaced


def _coarse_tiles(dequantize: Any) -> Any:
    """Scales of 32 x 32 tiles read as if a tile had 128 columns."""

    def replaced(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        columns = torch.arange(scale.shape[1]) // 4
        return dequantize(weight, scale.view(torch.uint8)[:, columns].view(scale.dtype), dtype)

    return replaced


def _large_epsilon(normalize: Any) -> Any:
    return lambda x, weight, eps: normalize(x, weight, 1e-6)


def _images_seen_by_engram(forward: Any) -> Any:
    return lambda self, streams, ids, rows, scales, mask: forward(
        self, streams, ids, rows, scales, None if mask is None else torch.zeros_like(mask)
    )


def _groups_of_32(rounded: Any) -> Any:
    """Compressed rows in the groups of the index keys."""
    return lambda x, format: rounded(x, 1 if format == 2 else format)


ROUNDING_FAULTS = (
    SeededFault(
        label="group 32 instead of 16",
        name=f"{PLUGINS}quantize_dequantize.reference.quantize_dequantize",
        make=_groups_of_32,
        stage="block_02",
        tensor="compressed_kv_out",
        op="QuantizeDequantize",
    ),
)
"""Faults that only an artefact with rounded caches can show."""

FAULTS = (
    SeededFault(
        label="FP8 tiles of 128 columns",
        name=f"{MODELING}weights.dequantize_fp8",
        make=_coarse_tiles,
        stage="block_00",
        op="attn.w",
        reloads=True,
    ),
    SeededFault(
        label="epsilon of 1e-6 in every norm",
        name=f"{MODELING}layers.rms_normalize",
        make=_large_epsilon,
        stage="block_00",
        op="attn_norm",
    ),
    SeededFault(
        label="Engram gate open at images",
        name=f"{MODELING}engram.Engram.forward",
        make=_images_seen_by_engram,
        stage="block_01",
        op="HyperConnectionMix",
    ),
    SeededFault(
        label="transposed comb",
        name=f"{MODELING}hyper_connections.expand",
        make=_transposed_comb,
        stage="block_00",
        op="between",
    ),
    SeededFault(
        label="mix of the same sublayer",
        name=f"{MODELING}block.Block.mix",
        make=_same_sublayer_mix,
        stage="block_00",
        op="ffn_norm",
    ),
    SeededFault(
        label="missing inverse rotation",
        name=f"{MODELING}rotary.rotate",
        make=_no_inverse,
        stage="block_00",
        op="attn.wo_b",
    ),
    SeededFault(
        label="rotation by split halves",
        name=f"{MODELING}rotary.rotate",
        make=_split_halves,
        stage="block_00",
        tensor="window_kv_out",
        op="CacheWrite",
    ),
    SeededFault(
        label="wrong theta",
        name=f"{MODELING}rotary.inverse_frequencies",
        make=_compressed_theta_everywhere,
        stage="embedding",
        tensor="window_rotary_cos",
        op="window_rotary_cos",
        reloads=True,
    ),
    SeededFault(
        label="no YaRN",
        name=f"{MODELING}rotary.inverse_frequencies",
        make=_no_yarn,
        stage="embedding",
        tensor="compress_rotary_cos",
        op="compress_rotary_cos",
        reloads=True,
    ),
    SeededFault(
        label="bias used as weight",
        name=f"{PLUGINS}moe_experts.reference.choose_experts",
        make=_bias_as_weight,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="route scale forgotten",
        name=f"{PLUGINS}moe_experts.reference.choose_experts",
        make=_no_route_scale,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="routing weights not normalised",
        name=f"{PLUGINS}moe_experts.reference.choose_experts",
        make=_weights_not_normalised,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="bias of images steers text",
        name=f"{MODELING}moe.Gate.forward",
        make=_image_bias_for_text,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="swapped FP4 nibbles",
        name=f"{PLUGINS}moe_experts.reference.dequantize_fp4",
        make=_swapped_nibbles,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="gate clamped from below",
        name=f"{PLUGINS}moe_experts.reference.swiglu",
        make=_clamp_below,
        stage="block_00",
        op="",
    ),
    SeededFault(
        label="clamp of the experts dropped",
        name=f"{PLUGINS}moe_experts.reference.swiglu",
        make=_no_swiglu_clamp,
        stage="block_00",
        op="MoEExperts",
    ),
    SeededFault(
        label="no sink",
        name=f"{PLUGINS}sparse_attention.reference.sparse_attention",
        make=_no_sink,
        stage="block_00",
        op="SparseAttention",
    ),
    SeededFault(
        label="sink scaled",
        name=f"{PLUGINS}sparse_attention.reference.sparse_attention",
        make=_scaled_sink,
        stage="block_00",
        op="SparseAttention",
    ),
    SeededFault(
        label="window one too short",
        name=f"{PLUGINS}sparse_attention.reference.window_positions",
        make=_short_window,
        stage="block_00",
        op="SparseAttention",
    ),
    SeededFault(
        label="stale window slot",
        name=f"{PLUGINS}cache_write.reference.cache_write_",
        make=_stale_slot,
        stage="block_00",
        tensor="window_kv_out",
        op="CacheWrite",
    ),
    SeededFault(
        label="visibility off by one",
        name=f"{PLUGINS}indexer.reference.visible_counts",
        make=_sees_too_far,
        stage="block_02",
        tensor="topk_indices",
        op="Indexer",
    ),
    SeededFault(
        label="newest candidate block not kept",
        name=f"{PLUGINS}indexer.reference.candidate_block_scores",
        make=_newest_block_not_kept,
        stage="block_06",
        tensor="candidate_blocks",
        op="Indexer",
    ),
    SeededFault(
        label="candidates ignored",
        name=f"{PLUGINS}indexer.reference.inside_candidates",
        make=_candidates_ignored,
        stage="block_08",
        tensor="topk_indices",
        op="Indexer",
    ),
    SeededFault(
        label="relu of the index scores forgotten",
        name=f"{PLUGINS}indexer.reference.index_scores",
        make=_relu_forgotten,
        stage="block_02",
        tensor="topk_indices",
        op="Indexer",
    ),
    SeededFault(
        label="row address cut to 32 bits",
        name=f"{PLUGINS}engram_gather.reference.engram_gather",
        make=_narrow_addresses,
        stage="block_01",
        op="EngramGather",
    ),
    SeededFault(
        label="Engram gate clamp dropped",
        name=f"{MODELING}engram.GATE_CLAMP",
        make=_no_floor,
        stage="block_01",
        op="HyperConnectionMix",
    ),
    SeededFault(
        label="sign of the Engram match dropped",
        name=f"{MODELING}engram.Engram.gate",
        make=_unsigned_gate,
        stage="block_01",
        op="HyperConnectionMix",
    ),
    SeededFault(
        label="wrong pad id",
        name=f"{PLUGINS}engram_hash.reference.engram_hash",
        make=_wrong_pad,
        stage="engram_hash",
        tensor="engram_ids_1",
        op="EngramHash",
    ),
    SeededFault(
        label="look-back not blocked before the beginning",
        name=f"{PLUGINS}engram_hash.reference.engram_hash",
        make=_block_flag_not_kept,
        stage="engram_hash",
        tensor="engram_ids_1",
        op="EngramHash",
    ),
    SeededFault(
        label="stale token cache",
        name="engram_trt.runtime.token_cache.TokenCache.recent",
        make=_stale_history,
        stage="session",
        tensor="token_history",
        op="",
    ),
    SeededFault(
        label="pairs pooled without scores",
        name=f"{MODELING}compressor.Compressor.pool",
        make=_pool_without_softmax,
        stage="block_02",
        op="attn.compressor.norm",
    ),
    SeededFault(
        label="entries rotated at their index",
        name=f"{MODELING}compressor.entry_positions",
        make=_entry_positions_by_index,
        stage="block_02",
        op="",
    ),
    SeededFault(
        label="two Sinkhorn rounds",
        name=f"{PLUGINS}hyper_connection_mix.reference.sinkhorn",
        make=_ten_sinkhorn_rounds,
        stage="block_00",
        op="HyperConnectionMix",
    ),
    SeededFault(
        label="post not doubled",
        name=f"{PLUGINS}hyper_connection_mix.reference.split_mixes",
        make=_post_not_doubled,
        stage="block_00",
        op="HyperConnectionMix",
    ),
    SeededFault(
        label="groups of heads in the wrong order",
        name=f"{MODELING}attention.Attention.project",
        make=_groups_swapped,
        stage="block_00",
        op="attn.wo_b",
    ),
    SeededFault(
        label="head reads stream 0 only",
        name=f"{STAGES}head.collapse",
        make=_head_reads_stream_zero,
        stage="head",
        tensor="logits",
        op="norm",
    ),
)
