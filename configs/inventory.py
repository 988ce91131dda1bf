"""Every tensor that a checkpoint in the released layout holds: name, dtype and shape (spec 7)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig

SCALE_BLOCK = 32
"""Values that one scale covers: along each axis of an FP8 tile, along a row of FP4 or of an Engram table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """What a tensor must look like; `dtype` is the safetensors name (BF16, F32, F8_E4M3, F8_E8M0, I8)."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Named = Iterator[tuple[str, TensorShape]]


def checkpoint_tensors(config: ModelConfig, layers: Collection[int] | None = None) -> dict[str, TensorShape]:
    """All tensors of a checkpoint, by name.

    Args:
        config: any model with FP8 weights and FP4 experts.
        layers: None for the whole model. Otherwise a partial one: the global text tensors and these backbone
            layers with their Engram tables, without vision tower, aligner and draft stages.

    Raises:
        ConfigError: for a config in another number format, or a layer id that the model does not have.
    """
    wanted = range(config.n_layers) if layers is None else sorted(set(layers))
    tensors = global_tensors(config, whole=layers is None)
    ordered = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BEHIND_THE_LAYERS)}
    for layer_id in wanted:
        ordered.update(layer_tensors(config, layer_id))
    return ordered | tensors


_BEHIND_THE_LAYERS = ("mtp.", "vision.", "aligner.")


def global_tensors(config: ModelConfig, *, whole: bool = True) -> dict[str, TensorShape]:
    """The tensors outside the backbone's layers; not `whole`, without vision tower, aligner and draft stages.

    Raises:
        ConfigError: for a config in another number format.
    """
    if config.dtype != "fp8" or config.expert_dtype != "fp4":
        raise ConfigError(
            "quantization_config",
            found=f"dtype {config.dtype!r}, expert_dtype {config.expert_dtype!r}",
            expected="fp8 weights and fp4 experts, the released layout",
            remedy="Use a released-layout config; folders of float weights have their own adapter.",
        )
    config.require_quantized_groups()
    tensors = dict(_global_tensors(config))
    if whole:
        tensors.update(_draft_tensors(config))
        tensors.update(_vision_tensors(config))
    return tensors


def layer_tensors(config: ModelConfig, layer_id: int) -> dict[str, TensorShape]:
    """The tensors of one backbone layer; ConfigError for a layer id that the model does not have."""
    return dict(_layer_tensors(config, config.layer(layer_id)))


def _bf16(name: str, *shape: int) -> tuple[str, TensorShape]:
    return name, TensorShape(dtype="BF16", shape=shape)


def _f32(name: str, *shape: int) -> tuple[str, TensorShape]:
    return name, TensorShape(dtype="F32", shape=shape)


def _blocks(size: int) -> int:
    return -(-size // SCALE_BLOCK)


def _fp8(name: str, rows: int, columns: int) -> Named:
    """A linear weight: FP8 codes with one scale per 32 x 32 tile."""
    yield f"{name}.weight", TensorShape(dtype="F8_E4M3", shape=(rows, columns))
    yield f"{name}.scale", TensorShape(dtype="F8_E8M0", shape=(_blocks(rows), _blocks(columns)))


def _fp4(name: str, rows: int, columns: int) -> Named:
    """An expert weight: two FP4 codes a byte along the inputs, one scale per 32 inputs of a row."""
    yield f"{name}.weight", TensorShape(dtype="I8", shape=(rows, columns // 2))
    yield f"{name}.scale", TensorShape(dtype="F8_E8M0", shape=(rows, columns // SCALE_BLOCK))


def _global_tensors(config: ModelConfig) -> Named:
    yield _bf16("embed.weight", config.vocab_size, config.dim)
    if config.has_vision:
        for name in ("image_start", "image_end", "image_newline"):
            yield _bf16(name, config.dim)
    yield _bf16("norm.weight", config.dim)
    yield _bf16("head.weight", config.vocab_size, config.dim)


def _layer_tensors(config: ModelConfig, layer: LayerConfig) -> Named:
    prefix = f"layers.{layer.layer_id}"
    yield from _block_tensors(config, prefix, config.n_routed_experts)
    if layer.is_kv_source:
        yield from _source_tensors(config, f"{prefix}.attn", layer.compress_ratio)
    if layer.is_index_source:
        heads, width = config.index_n_heads, config.index_head_dim
        yield from _fp8(f"{prefix}.attn.indexer.wq_b", heads * width, config.q_lora_rank)
        yield _bf16(f"{prefix}.attn.indexer.weights_proj.weight", heads, config.dim)
    if layer.engram_index is not None:
        rows = config.engram_num_embeddings[layer.engram_index]
        yield from _engram_tensors(config, f"{prefix}.engram", rows)


def _block_tensors(config: ModelConfig, prefix: str, num_experts: int) -> Named:
    """What the blocks of the backbone and of the draft stages have in common."""
    dim, mixes = config.dim, config.hc_mixes
    for part in ("attn", "ffn"):
        yield _f32(f"{prefix}.hc_{part}_fn", mixes, config.hc_mult * dim)
        yield _f32(f"{prefix}.hc_{part}_base", mixes)
        yield _f32(f"{prefix}.hc_{part}_scale", 3)
        yield _bf16(f"{prefix}.{part}_norm.weight", dim)
    yield from _attention_tensors(config, f"{prefix}.attn")
    yield from _moe_tensors(config, f"{prefix}.ffn", num_experts)


def _attention_tensors(config: ModelConfig, prefix: str) -> Named:
    heads_width = config.n_heads * config.head_dim
    grouped = config.o_groups * config.o_lora_rank
    yield _f32(f"{prefix}.attn_sink", config.n_heads)
    yield from _fp8(f"{prefix}.wq_a", config.q_lora_rank, config.dim)
    yield _bf16(f"{prefix}.q_norm.weight", config.q_lora_rank)
    yield from _fp8(f"{prefix}.wq_b", heads_width, config.q_lora_rank)
    yield from _fp8(f"{prefix}.wkv", config.head_dim, config.dim)
    yield _bf16(f"{prefix}.kv_norm.weight", config.head_dim)
    yield from _fp8(f"{prefix}.wo_a", grouped, heads_width // config.o_groups)
    yield from _fp8(f"{prefix}.wo_b", config.dim, grouped)


def _source_tensors(config: ModelConfig, prefix: str, ratio: int) -> Named:
    width = config.head_dim
    yield _bf16(f"{prefix}.compressor.wkv.weight", width, config.dim)
    if ratio > 1:
        yield _bf16(f"{prefix}.compressor.wgate.weight", width, config.dim)
    yield _bf16(f"{prefix}.compressor.norm.weight", width)
    yield _bf16(f"{prefix}.indexer.wk.weight", config.index_head_dim, width)
    yield _bf16(f"{prefix}.indexer.k_norm.weight", config.index_head_dim)


def _moe_tensors(config: ModelConfig, prefix: str, num_experts: int) -> Named:
    dim, inner = config.dim, config.moe_inter_dim
    yield _bf16(f"{prefix}.gate.weight", num_experts, dim)
    yield _f32(f"{prefix}.gate.bias", num_experts)
    if config.has_vision:
        yield _f32(f"{prefix}.gate.bias_vl", num_experts)
    yield from _fp8(f"{prefix}.shared_experts.w1", inner, dim)
    yield from _fp8(f"{prefix}.shared_experts.w3", inner, dim)
    yield from _fp8(f"{prefix}.shared_experts.w2", dim, inner)
    for expert in range(num_experts):
        yield from _fp4(f"{prefix}.experts.{expert}.w1", inner, dim)
        yield from _fp4(f"{prefix}.experts.{expert}.w3", inner, dim)
        yield from _fp4(f"{prefix}.experts.{expert}.w2", dim, inner)


def _engram_tensors(config: ModelConfig, prefix: str, rows: int) -> Named:
    width, streams = config.engram_head_dim, config.hc_mult
    yield f"{prefix}.embed.weight", TensorShape(dtype="F8_E4M3", shape=(rows, width))
    yield f"{prefix}.embed.scale", TensorShape(dtype="F8_E8M0", shape=(rows, width // SCALE_BLOCK))
    yield from _fp8(f"{prefix}.wkv", (streams + 1) * config.dim, config.engram_columns * width)
    yield _bf16(f"{prefix}.q_weight", streams, config.dim)
    yield _bf16(f"{prefix}.k_weight", streams, config.dim)


def _draft_tensors(config: ModelConfig) -> Named:
    last = config.num_dspark_stages - 1
    rank = config.dspark_markov_rank
    for stage in range(config.num_dspark_stages):
        prefix = f"mtp.{stage}"
        yield from _block_tensors(config, prefix, config.num_dspark_routed_experts)
        if stage == 0:
            taps = len(config.dspark_target_layer_ids)
            yield from _fp8(f"{prefix}.main_proj", config.dim, taps * config.dim)
            yield _bf16(f"{prefix}.main_norm.weight", config.dim)
        if stage == last:
            yield _bf16(f"{prefix}.norm.weight", config.dim)
            yield _bf16(f"{prefix}.markov_head.embed.weight", config.vocab_size, rank)
            yield _bf16(f"{prefix}.markov_head.head.weight", config.vocab_size, rank)
            yield _bf16(f"{prefix}.confidence_head.proj.weight", 1, config.dim + rank)


def _vision_tensors(config: ModelConfig) -> Named:
    if not config.has_vision:
        return
    width, inner = config.vision_dim, config.vision_inter_dim
    yield _bf16("vision.patch_embed.proj.weight", width, 3 * config.vision_patch_size**2)
    yield _bf16("vision.patch_embed.proj.bias", width)
    for block in range(config.vision_n_layers):
        prefix = f"vision.blocks.{block}"
        yield _bf16(f"{prefix}.norm1.weight", width)
        yield _bf16(f"{prefix}.norm2.weight", width)
        yield _bf16(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        yield _bf16(f"{prefix}.attn.wqkv.bias", 3 * width)
        yield _bf16(f"{prefix}.attn.wo.weight", width, width)
        yield _bf16(f"{prefix}.attn.wo.bias", width)
        yield _bf16(f"{prefix}.mlp.w1.weight", 2 * inner, width)
        yield _bf16(f"{prefix}.mlp.w2.weight", width, inner)
    yield _bf16("vision.norm.weight", width)
    yield _bf16("aligner.w1.weight", config.dim, width * config.vision_downsample_ratio**2)
    yield _bf16("aligner.w1.bias", config.dim)
    yield _bf16("aligner.w2.weight", config.dim, config.dim)
    yield _bf16("aligner.w2.bias", config.dim)
