"""Interfaces of the stages, without torch: a plan needs them before anything is installed that could trace them.

Blocks have a module of their own, `export/stages/block.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.stages.block import block_spec
from engram_trt.export.stages.rotary_families import rotary_families
from engram_trt.export.stages.split_block import has_attention, split_block_specs

ENGRAM_HASH, EMBEDDING, HEAD = "engram_hash", "embedding", "head"


def chain_specs(
    config: ModelConfig,
    dtype: str,
    *,
    packed_experts: bool,
    dspark_taps: bool,
    split_experts: bool = False,
    layers: Iterable[int] | None = None,
) -> tuple[StageSpec, ...]:
    """Specs of the whole chain, or of some layers only.

    Args:
        config: the model.
        dtype: of the stages, "float32" or "bfloat16".
        packed_experts: routed experts stay FP4 codes.
        dspark_taps: DSpark target layers put out their tap.
        split_experts: a layer's routed experts are a stage of their own.
        layers: layer ids to include without hash, embedding and head; None for everything.

    Returns:
        `engram_hash` (if the model has Engram), `embedding`, the blocks, `head`. See `stages/block.py` and
        `stages/split_block.py` for the blocks.
    """
    specs_of = split_block_specs if split_experts else _block_specs
    blocks = tuple(
        spec
        for layer_id in (range(config.n_layers) if layers is None else layers)
        for spec in specs_of(
            config, config.layer(layer_id), dtype, packed_experts=packed_experts, dspark_taps=dspark_taps
        )
    )
    if layers is not None:
        return blocks
    first = (engram_hash_spec(config),) if config.has_engram else ()
    return (*first, embedding_spec(config, dtype), *blocks, head_spec(config, dtype))


def _block_specs(
    config: ModelConfig, layer: LayerConfig, dtype: str, *, packed_experts: bool, dspark_taps: bool
) -> tuple[StageSpec, ...]:
    return (block_spec(config, layer, dtype, packed_experts=packed_experts, dspark_taps=dspark_taps),)


def engram_hash_spec(config: ModelConfig) -> StageSpec:
    """Token ids to rows of every Engram table.

    | input         | dtype | shape                     | filled by                                               |
    |---------------|-------|---------------------------|---------------------------------------------------------|
    | token_ids     | int64 | batch, tokens             | session                                                 |
    | image_mask    | bool  | batch, tokens             | session; True takes part in no n-gram                   |
    | token_history | int64 | batch, max_ngram_size - 1 | session, from its token cache; DEAD (-1) where no token |

    | output         | dtype | shape                  | read by                                      |
    |----------------|-------|------------------------|----------------------------------------------|
    | compressed_ids | int64 | batch, tokens          | the session's token cache                    |
    | engram_ids_N   | int64 | batch, tokens, columns | the block of Engram layer N, as `engram_ids` |
    """
    token = ("batch", "tokens")
    history = ("batch", config.engram_max_ngram_size - 1)
    inputs = (
        TensorSpec(name="token_ids", dtype="int64", shape=token, role="step"),
        TensorSpec(name="image_mask", dtype="bool", shape=token, role="step"),
        TensorSpec(name="token_history", dtype="int64", shape=history, role="step"),
    )
    ids = (
        TensorSpec(
            name=f"engram_ids_{layer_id}",
            tensor="engram_ids",
            owner=layer_id,
            dtype="int64",
            shape=(*token, config.engram_columns),
            role="activation",
        )
        for layer_id in config.engram_layer_ids
    )
    compressed = TensorSpec(name="compressed_ids", dtype="int64", shape=token, role="activation")
    return StageSpec(name=ENGRAM_HASH, kind=ENGRAM_HASH, inputs=inputs, outputs=(compressed, *ids))


def embedding_spec(config: ModelConfig, dtype: str) -> StageSpec:
    """Token ids to residual streams, and the step's rotary tables; `dtype` is "float32" or "bfloat16".

    | input                     | dtype | shape              | filled by                     |
    |---------------------------|-------|--------------------|-------------------------------|
    | token_ids                 | int64 | batch, tokens      | session                       |
    | start_positions           | int64 | batch              | session                       |
    | image_mask (vision)       | bool  | batch, tokens      | session                       |
    | image_embeddings (vision) | stage | batch, tokens, dim | session; rows used where True |

    | output                                   | dtype   | shape                       | read by               |
    |------------------------------------------|---------|-----------------------------|-----------------------|
    | hidden_states                            | stage   | batch, tokens, hc_mult, dim | first block           |
    | pre_mix                                  | float32 | batch, tokens, hc_mult      | first block: stream 0 |
    | window_rotary_cos, window_rotary_sin     | float32 | batch, tokens, rope         | blocks of ratio 0     |
    | compress_rotary_cos, compress_rotary_sin | float32 | batch, tokens, rope         | all other blocks      |
    """
    token = ("batch", "tokens")
    inputs = [
        TensorSpec(name="token_ids", dtype="int64", shape=token, role="step"),
        TensorSpec(name="start_positions", dtype="int64", shape=("batch",), role="step"),
    ]
    if config.has_vision:
        rows = (*token, config.dim)
        inputs.append(TensorSpec(name="image_mask", dtype="bool", shape=token, role="step"))
        inputs.append(TensorSpec(name="image_embeddings", dtype=dtype, shape=rows, role="step"))
    streams = (*token, config.hc_mult, config.dim)
    outputs = [
        TensorSpec(name="hidden_states", dtype=dtype, shape=streams, role="activation"),
        TensorSpec(name="pre_mix", dtype="float32", shape=(*token, config.hc_mult), role="activation"),
    ]
    for family in rotary_families(config):
        for part in ("cos", "sin"):
            name, shape = f"{family}_rotary_{part}", (*token, config.rope_head_dim)
            outputs.append(TensorSpec(name=name, dtype="float32", shape=shape, role="activation"))
    return StageSpec(name=EMBEDDING, kind=EMBEDDING, inputs=tuple(inputs), outputs=tuple(outputs))


def head_spec(config: ModelConfig, dtype: str) -> StageSpec:
    """Streams to logits, at chosen tokens only.

    | input           | dtype   | shape                       | filled by                                    |
    |-----------------|---------|-----------------------------|----------------------------------------------|
    | hidden_states   | stage   | batch, tokens, hc_mult, dim | last block                                   |
    | pre_mix         | float32 | batch, tokens, hc_mult      | last block                                   |
    | logit_positions | int64   | batch, selected             | session: index within the step of each token |

    | output | dtype   | shape                  | read by |
    |--------|---------|------------------------|---------|
    | logits | float32 | batch, selected, vocab | session |
    """
    token = ("batch", "tokens")
    streams = (*token, config.hc_mult, config.dim)
    selected = ("batch", "selected")
    inputs = (
        TensorSpec(name="hidden_states", dtype=dtype, shape=streams, role="activation"),
        TensorSpec(name="pre_mix", dtype="float32", shape=(*token, config.hc_mult), role="activation"),
        TensorSpec(name="logit_positions", dtype="int64", shape=selected, role="step"),
    )
    logits = TensorSpec(name="logits", dtype="float32", shape=(*selected, config.vocab_size), role="activation")
    return StageSpec(name=HEAD, kind=HEAD, inputs=inputs, outputs=(logits,))


def computed_names(spec: StageSpec, config: ModelConfig) -> tuple[str, ...]:
    """Weights of a stage that follow from the config or the tokenizer; the checkpoint has no such tensors."""
    if spec.name == ENGRAM_HASH:
        return ("token_map", "multipliers", "primes", "offsets")
    if spec.name == EMBEDDING:
        return tuple(f"{family}_frequencies" for family in rotary_families(config))
    if spec.layer_id is not None and has_attention(spec) and config.layer(spec.layer_id).is_kv_source:
        return ("attn.entry_frequencies",) if config.layer(spec.layer_id).compress_ratio > 1 else ()
    return ()
