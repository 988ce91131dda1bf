"""Every rule between the values of a config: the message must name the key."""

from __future__ import annotations

from typing import Any

import pytest

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset

RELEASED = model_preset("released").to_flat_dict()
RATIOS = RELEASED["compress_ratios"]


def with_ratio(layer_id: int, ratio: int) -> list[int]:
    return [ratio if position == layer_id else value for position, value in enumerate(RATIOS)]


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("vocab_size", {"vocab_size": 0}),
    ("dim", {"dim": -5120}),
    ("n_heads", {"n_heads": 0}),
    ("n_shared_experts", {"n_shared_experts": 2}),
    ("n_activated_experts", {"n_activated_experts": 385}),
    ("n_activated_experts", {"n_activated_experts": 0}),
    ("score_func", {"score_func": "tanh"}),
    ("gate_temp", {"gate_temp": 0}),
    ("route_scale", {"route_scale": 0.0}),
    ("swiglu_limit", {"swiglu_limit": -1}),
    ("norm_eps", {"norm_eps": 0}),
    ("hc_eps", {"hc_eps": -1e-6}),
    ("hc_mult", {"hc_mult": 0}),
    ("hc_sinkhorn_iters", {"hc_sinkhorn_iters": 0}),
    ("rope_head_dim", {"rope_head_dim": 63}),
    ("head_dim", {"head_dim": 32}),
    ("index_head_dim", {"index_head_dim": 32}),
    ("o_groups", {"o_groups": 7}),
    ("window_size", {"window_size": 0}),
    ("rope_theta", {"rope_theta": 0}),
    ("compress_rope_theta", {"compress_rope_theta": 1}),
    ("rope_factor", {"rope_factor": 0}),
    ("beta_slow", {"beta_slow": 0}),
    ("beta_fast", {"beta_fast": 0.5}),
    ("original_seq_len", {"original_seq_len": -1}),
    ("dtype", {"dtype": "int8"}),
    ("expert_dtype", {"expert_dtype": "fp8"}),
    ("bos_token_id", {"bos_token_id": 129280}),
    ("eos_token_id", {"eos_token_id": -1}),
    ("max_position_embeddings", {"max_position_embeddings": 0}),
    ("temperature", {"temperature": -0.5}),
    # schedule
    ("compress_ratios", {"compress_ratios": RATIOS[:39]}),
    ("compress_ratios", {"compress_ratios": [*RATIOS, 0]}),
    ("compress_ratios", {"compress_ratios": [0, 0] + [2] * 10 + [1] * 28}),
    ("compress_ratios", {"compress_ratios": with_ratio(5, 3)}),
    ("compress_ratios", {"compress_ratios": with_ratio(5, -1)}),
    ("compress_ratios", {"compress_ratios": with_ratio(41, 1)}),
    ("compress_ratios", {"compress_ratios": with_ratio(5, 1)}),
    ("kv_source_layers", {"compress_ratios": with_ratio(1, 2)}),
    ("kv_source_layers", {"kv_source_layers": [8, 2, 14, 20]}),
    ("kv_source_layers", {"kv_source_layers": [2, 8, 14, 20, 40]}),
    ("kv_source_layers", {"kv_source_layers": [2, 2, 8, 14, 20]}),
    ("kv_source_layers", {"kv_source_layers": [1, 2, 8, 14, 20]}),
    ("kv_source_layers", {"kv_source_layers": [8, 14, 20]}),
    ("index_source_layers", {"index_source_layers": [2, 8, 14, 24, 28, 32, 36]}),
    ("index_source_layers", {"index_source_layers": [0, 2, 8, 14, 20]}),
    ("index_topk", {"index_topk": 0}),
    ("index_n_heads", {"index_n_heads": 0}),
    # candidates: (blocks - 1) * size + 1 is the smallest population
    ("index_topk", {"candidate_topk_blocks": 64}),
    ("index_topk", {"index_topk": 2047 * 8 + 2}),
    ("candidate_topk_blocks", {"candidate_topk_blocks": 0}),
    ("candidate_block_size", {"candidate_block_size": 0}),
    ("candidate_source_layer", {"candidate_source_layer": 24}),
    ("candidate_source_layer", {"candidate_source_layer": 14}),
    ("candidate_source_layer", {"candidate_source_layer": 40}),
    # Engram
    ("engram_num_embeddings", {"engram_num_embeddings": [384006168, 384016681]}),
    ("engram_num_embeddings", {"engram_num_embeddings": [384016682, 384006168]}),
    ("engram_num_embeddings", {"engram_num_embeddings": [384006168]}),
    ("engram_num_embeddings", {"engram_num_embeddings": [0, 0]}),
    ("engram_num_embeddings", {"engram_vocab_size": 16000058}),
    ("engram_layer_ids", {"engram_layer_ids": [14, 1]}),
    ("engram_layer_ids", {"engram_layer_ids": [1, 40]}),
    ("engram_max_ngram_size", {"engram_max_ngram_size": 1}),
    ("engram_n_heads", {"engram_n_heads": 0}),
    ("engram_head_dim", {"engram_head_dim": 250}),
    ("engram_pad_id", {"engram_pad_id": 129280}),
    ("engram_pad_id", {"engram_pad_id": -1}),
    ("engram_compressed_vocab_size", {"engram_compressed_vocab_size": 129281}),
    ("engram_compressed_vocab_size", {"engram_compressed_vocab_size": 0}),
    # draft stages
    ("n_mtp_layers", {"n_mtp_layers": 0, "compress_ratios": RATIOS[:40]}),
    ("dspark_block_size", {"dspark_block_size": -1}),
    ("dspark_noise_token_id", {"dspark_noise_token_id": 129280}),
    ("dspark_target_layer_ids", {"dspark_target_layer_ids": []}),
    ("dspark_target_layer_ids", {"dspark_target_layer_ids": [38, 37, 39]}),
    ("dspark_target_layer_ids", {"dspark_target_layer_ids": [37, 38, 40]}),
    ("dspark_markov_rank", {"dspark_markov_rank": 0}),
    ("dspark_n_activated_experts", {"dspark_n_activated_experts": 129}),
    ("dspark_n_activated_experts", {"dspark_n_routed_experts": 2}),
    # vision
    ("vision_n_layers", {"vision_n_layers": -1}),
    ("vision_n_heads", {"vision_n_heads": 15}),
    ("vision_dim", {"vision_dim": 0}),
    ("vision_patch_size", {"vision_patch_size": 0}),
    ("vision_downsample_ratio", {"vision_downsample_ratio": 0}),
    ("vision_rope_theta", {"vision_rope_theta": 0}),
    ("vision_max_wh_ratio", {"vision_max_wh_ratio": -2.0}),
    ("image_token_id", {"image_token_id": 129280}),
]


@pytest.mark.parametrize(("key", "change"), REJECTED, ids=lambda value: str(value)[:60])
def test_an_inconsistent_value_is_rejected_by_name(key: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(RELEASED | change, where="inference/config.json")
    assert caught.value.where == f"inference/config.json: {key}"
    assert caught.value.remedy


def test_the_numbers_a_reader_needs_are_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(RELEASED | {"engram_num_embeddings": [1, 2]})
    assert "384006168" in caught.value.expected
    assert "384016682" in caught.value.expected
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(RELEASED | {"compress_ratios": with_ratio(17, 1)})
    assert caught.value.found == "1 for layer 17"
    assert "layer 14" in caught.value.expected
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(RELEASED | {"compress_ratios": RATIOS[:39]})
    assert caught.value.expected == "40 or 43 entries"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"dim": 5128}, "text_config.hidden_size"),
        ({"moe_inter_dim": 2300}, "text_config.moe_intermediate_size"),
        ({"q_lora_rank": 1281}, "text_config.q_lora_rank"),
        ({"head_dim": 520}, "text_config.head_dim"),
        ({"index_head_dim": 100}, "text_config.index_head_dim"),
        ({"o_groups": 1, "o_lora_rank": 1001}, "text_config.o_lora_rank"),
    ],
)
def test_a_released_config_must_fit_groups_of_32(change: dict[str, Any], key: str) -> None:
    flat_only = ModelConfig.from_dict(RELEASED | change)
    with pytest.raises(ConfigError, match="multiple of 32"):
        flat_only.require_quantized_groups()
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(flat_only.to_hf_dict(), where="config.json")
    assert caught.value.where == f"config.json: {key}"


def test_groups_of_32_are_not_asked_of_float_weights() -> None:
    config = ModelConfig.from_dict(RELEASED | {"dim": 5128, "dtype": "bf16", "expert_dtype": None})
    config.require_quantized_groups()
    assert ModelConfig.from_dict(config.to_hf_dict()) == config
