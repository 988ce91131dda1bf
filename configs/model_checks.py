"""What must hold between the values of a `ModelConfig`; each rule names the key it rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.errors import ConfigError
from engram_trt.configs.layers import last_at_or_below

if TYPE_CHECKING:
    from engram_trt.configs.model import ModelConfig

_ANY = 2**31 - 1
# Inclusive ranges. Upper ends keep a hostile file from asking for unbounded work, far above any real model.
_RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (2, _ANY),
    "dim": (1, 1 << 20),
    "moe_inter_dim": (1, 1 << 20),
    "n_layers": (1, 4096),
    "n_mtp_layers": (0, 256),
    "n_heads": (1, 65536),
    "n_routed_experts": (1, 65536),
    "n_shared_experts": (1, 1),
    "n_activated_experts": (1, 65536),
    "q_lora_rank": (1, 1 << 20),
    "head_dim": (1, 65536),
    "rope_head_dim": (2, 65536),
    "o_groups": (1, 65536),
    "o_lora_rank": (1, 1 << 20),
    "window_size": (1, 1 << 24),
    "original_seq_len": (0, _ANY),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1024),
    "max_batch_size": (1, _ANY),
    "max_seq_len": (1, _ANY),
}
_INDEX_RANGES = {"index_n_heads": (1, 65536), "index_head_dim": (1, 65536), "index_topk": (1, 1 << 24)}
_CANDIDATE_RANGES = {"candidate_topk_blocks": (1, 1 << 24), "candidate_block_size": (1, 1 << 24)}
_ENGRAM_RANGES: dict[str, tuple[int, int]] = {
    "engram_max_ngram_size": (2, 64),
    "engram_vocab_size": (1, 1 << 40),
    "engram_n_heads": (1, 1024),
    "engram_head_dim": (1, 65536),
}
_DSPARK_RANGES: dict[str, tuple[int, int]] = {
    "dspark_block_size": (1, 1024),
    "n_mtp_layers": (1, 256),
    "dspark_markov_rank": (1, 1 << 20),
    "dspark_n_routed_experts": (0, 65536),
    "dspark_n_activated_experts": (0, 65536),
}
_VISION_RANGES: dict[str, tuple[int, int]] = {
    "vision_n_layers": (1, 4096),
    "vision_dim": (1, 1 << 20),
    "vision_n_heads": (1, 65536),
    "vision_inter_dim": (1, 1 << 20),
    "vision_patch_size": (1, 4096),
    "vision_downsample_ratio": (1, 64),
    "vision_max_n_token": (1, 1 << 24),
    "vision_min_pixels": (0, _ANY),
}
_POSITIVE = ("gate_temp", "route_scale", "norm_eps", "hc_eps", "rope_theta")
_SCORE_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")


def check_model(config: ModelConfig) -> None:
    """Raise `ConfigError` (its `where` is the flat key) at the first rule that `config` breaks."""
    _check_ranges(config, _RANGES)
    _check_text(config)
    _check_schedule(config)
    if config.kv_source_layers:
        _check_index(config)
    if config.has_candidates:
        _check_candidates(config)
    if config.has_engram:
        _check_engram(config)
    if config.dspark_block_size != 0:
        _check_dspark(config)
    if config.vision_n_layers != 0:
        _check_vision(config)


def _bad(key: str, found: object, expected: str) -> NoReturn:
    raise ConfigError(key, found=str(found), expected=expected, remedy="Use the checkpoint's own config.json.")


def _check_ranges(config: ModelConfig, ranges: dict[str, tuple[int, int]]) -> None:
    for key, (low, high) in ranges.items():
        value = getattr(config, key)
        if not low <= value <= high:
            _bad(key, value, str(low) if low == high else f"{low}..{high}")


def _check_token(config: ModelConfig, key: str) -> None:
    value = getattr(config, key)
    if not 0 <= value < config.vocab_size:
        _bad(key, value, f"a token id below vocab_size {config.vocab_size}")


def _check_text(config: ModelConfig) -> None:
    for key in _POSITIVE:
        if getattr(config, key) <= 0:
            _bad(key, getattr(config, key), "a number above 0")
    if config.swiglu_limit < 0:
        _bad("swiglu_limit", config.swiglu_limit, "0 (no clamp) or more")
    if config.temperature < 0:
        _bad("temperature", config.temperature, "0 or more")
    if config.score_func not in _SCORE_FUNCTIONS:
        _bad("score_func", repr(config.score_func), "one of " + ", ".join(_SCORE_FUNCTIONS))
    if config.n_activated_experts > config.n_routed_experts:
        _bad("n_activated_experts", config.n_activated_experts, f"at most {config.n_routed_experts} routed")
    if config.rope_head_dim % 2:
        _bad("rope_head_dim", config.rope_head_dim, "an even number: rotation works on pairs")
    if config.head_dim < config.rope_head_dim:
        _bad("head_dim", config.head_dim, f"at least rope_head_dim {config.rope_head_dim}")
    if config.n_heads % config.o_groups:
        _bad("o_groups", config.o_groups, f"a divisor of n_heads {config.n_heads}")
    if config.dtype not in ("fp8", "bf16"):
        _bad("dtype", repr(config.dtype), "'fp8' or 'bf16'")
    if config.expert_dtype not in ("fp4", None):
        _bad("expert_dtype", repr(config.expert_dtype), "'fp4' or null")
    for key in ("bos_token_id", "eos_token_id"):
        _check_token(config, key)
    if config.max_position_embeddings is not None and config.max_position_embeddings < 1:
        _bad("max_position_embeddings", config.max_position_embeddings, "1 or more")


def _check_layer_list(config: ModelConfig, key: str) -> None:
    previous = -1
    for layer_id in getattr(config, key):
        if not previous < layer_id < config.n_layers:
            _bad(key, list(getattr(config, key)), f"ascending layer ids below n_layers {config.n_layers}")
        previous = layer_id


def _check_schedule(config: ModelConfig) -> None:
    ratios, n_layers = config.compress_ratios, config.n_layers
    lengths = sorted({n_layers, n_layers + config.n_mtp_layers})
    if len(ratios) not in lengths:
        _bad("compress_ratios", f"{len(ratios)} entries", f"{' or '.join(map(str, lengths))} entries")
    for layer_id, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            _bad("compress_ratios", f"{ratio} for layer {layer_id}", "0, 1 or 2")
        if layer_id >= n_layers and ratio != 0:
            _bad("compress_ratios", f"{ratio} for draft stage {layer_id - n_layers}", "0: it reads a window")
    for key in ("kv_source_layers", "index_source_layers"):
        _check_layer_list(config, key)
        for layer_id in getattr(config, key):
            if ratios[layer_id] == 0:
                _bad(key, f"layer {layer_id}, whose compress ratio is 0", "layers with a ratio of 1 or 2")
    for layer_id in config.kv_source_layers:
        if layer_id not in config.index_source_layers:
            _bad("index_source_layers", f"no kv source {layer_id}", "every kv source: it owns the index keys")
    for layer_id, ratio in enumerate(ratios[:n_layers]):
        source = last_at_or_below(config.kv_source_layers, layer_id)
        if ratio and source is None:
            _bad("kv_source_layers", f"none at or below layer {layer_id} of ratio {ratio}", "a source for it")
        if ratio and source is not None and ratios[source] != ratio:
            _bad(
                "compress_ratios",
                f"{ratio} for layer {layer_id}",
                f"{ratios[source]}, the ratio of layer {source}, whose cache it reads",
            )


def _check_index(config: ModelConfig) -> None:
    _check_ranges(config, _INDEX_RANGES)
    if config.index_head_dim < config.rope_head_dim:
        _bad("index_head_dim", config.index_head_dim, f"at least rope_head_dim {config.rope_head_dim}")
    if config.compress_rope_theta <= 1:
        _bad("compress_rope_theta", config.compress_rope_theta, "a number above 1")
    if config.original_seq_len == 0:
        return
    if config.rope_factor <= 0:
        _bad("rope_factor", config.rope_factor, "a number above 0")
    if config.beta_slow <= 0:
        _bad("beta_slow", config.beta_slow, "a number above 0")
    if config.beta_fast < config.beta_slow:
        _bad("beta_fast", config.beta_fast, f"at least beta_slow {config.beta_slow}")


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer
    _check_ranges(config, _CANDIDATE_RANGES)
    if source not in config.kv_source_layers or config.compress_ratios[source] != 1:
        _bad("candidate_source_layer", source, "a kv source of ratio 1, or -1 for no candidate stage")
    population = (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1
    if config.index_topk > population:
        _bad(
            "index_topk",
            config.index_topk,
            f"at most {population}, the smallest number of candidates "
            f"((candidate_topk_blocks {config.candidate_topk_blocks} - 1) * candidate_block_size "
            f"{config.candidate_block_size} + 1)",
        )
    for layer_id in config.index_source_layers:
        if layer_id > source and config.compress_ratios[layer_id] != 1:
            _bad("candidate_source_layer", source, f"none below layer {layer_id}, whose entries are pairs")


def _check_engram(config: ModelConfig) -> None:
    _check_layer_list(config, "engram_layer_ids")
    _check_ranges(config, _ENGRAM_RANGES)
    if config.engram_head_dim % 32:
        _bad("engram_head_dim", config.engram_head_dim, "a multiple of 32, which one scale of a row covers")
    _check_token(config, "engram_pad_id")
    if not 1 <= config.engram_compressed_vocab_size <= config.vocab_size:
        _bad(
            "engram_compressed_vocab_size",
            config.engram_compressed_vocab_size,
            f"1..{config.vocab_size} (vocab_size)",
        )
    num_columns = len(config.engram_layer_ids) * config.engram_columns
    if num_columns > 65536:
        _bad("engram_n_heads", f"{num_columns} hash columns in all", "at most 65536")
    derived = EngramLayout.from_config(config).num_embeddings
    if config.engram_num_embeddings != derived:
        _bad(
            "engram_num_embeddings",
            list(config.engram_num_embeddings),
            f"{list(derived)}, the sums of the primes derived from engram_vocab_size",
        )


def _check_dspark(config: ModelConfig) -> None:
    _check_ranges(config, _DSPARK_RANGES)
    if not config.dspark_target_layer_ids:
        _bad("dspark_target_layer_ids", "an empty list", "the layers whose input the draft stages read")
    _check_layer_list(config, "dspark_target_layer_ids")
    _check_token(config, "dspark_noise_token_id")
    if config.num_dspark_activated_experts > config.num_dspark_routed_experts:
        _bad(
            "dspark_n_activated_experts",
            config.num_dspark_activated_experts,
            f"at most {config.num_dspark_routed_experts} routed",
        )


def _check_vision(config: ModelConfig) -> None:
    _check_ranges(config, _VISION_RANGES)
    _check_token(config, "image_token_id")
    if config.vision_dim % config.vision_n_heads or config.vision_dim // config.vision_n_heads % 4:
        _bad("vision_n_heads", config.vision_n_heads, "heads of equal width, a multiple of 4 (2-D rotation)")
    if config.vision_rope_theta <= 0:
        _bad("vision_rope_theta", config.vision_rope_theta, "a number above 0")
    if config.vision_max_wh_ratio is not None and config.vision_max_wh_ratio <= 0:
        _bad("vision_max_wh_ratio", config.vision_max_wh_ratio, "null or a number above 0")
