"""A layer as three stages, where a deployment spreads its routed experts over several devices.

| stage (kind)                  | reads                                                          | puts out          |
|-------------------------------|----------------------------------------------------------------|-------------------|
| `block_NN` (`.._choice`)      | what `stages/block.py` lists, but no experts                   | that; see below   |
| `block_NN_experts` (`experts`)| ffn_in, expert_ids, expert_weights, any number of experts      | expert_outputs    |
| `block_NN_sum` (`sum`)        | hidden_states, ffn_in, ffn_post, ffn_comb, expert_outputs      | hidden_states_out |

| handed on                | shape                                     | what                                       |
|--------------------------|-------------------------------------------|--------------------------------------------|
| hidden_states            | batch, tokens, hc_mult, dim               | the streams after attention                |
| ffn_in                   | batch, tokens, dim                        | what the experts read                      |
| ffn_post (float32)       | batch, tokens, hc_mult                    | how their output is written to the streams |
| ffn_comb (float32)       | batch, tokens, hc_mult, hc_mult           | how the streams are mixed meanwhile        |
| expert_ids (int32)       | batch, tokens, n_activated_experts        | chosen experts, ascending; -1: elsewhere   |
| expert_weights (float32) | batch, tokens, n_activated_experts        | routing weights                            |
| expert_outputs           | batch, tokens, n_activated_experts, dim   | of every chosen expert; zeros for -1       |
"""

from __future__ import annotations

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, Shape, StageSpec
from engram_trt.export.stages.block import (
    TOKEN,
    BlockBuilder,
    add_attention_half,
    add_experts,
    add_tap,
    block_kind,
    block_name,
)

EXPERT_SUM = "sum"
_CHOICE = "_choice"


def split_block_specs(
    config: ModelConfig, layer: LayerConfig, dtype: str, *, packed_experts: bool, dspark_taps: bool
) -> tuple[StageSpec, ...]:
    """The three stages of one layer; arguments as for `block_spec`."""
    name = block_name(layer.layer_id)
    shapes = _handed_on(config)

    choice = BlockBuilder(config, layer, dtype)
    add_attention_half(choice)
    for tensor in ("ffn_in", "ffn_post", "ffn_comb", "expert_ids", "expert_weights"):
        choice.publish(tensor, *_typed(tensor, shapes, dtype))
    add_tap(choice, dspark_taps=dspark_taps)

    experts = BlockBuilder(config, layer, dtype)
    for tensor in ("ffn_in", "expert_ids", "expert_weights"):
        shape, own = _typed(tensor, shapes, dtype)
        experts.take(tensor, shape, "activation", own)
    add_experts(experts, EXPERTS, packed=packed_experts)
    experts.publish("expert_outputs", *_typed("expert_outputs", shapes, dtype))

    total = BlockBuilder(config, layer, dtype)
    streams = total.take("hidden_states", (*TOKEN, config.hc_mult, config.dim), "activation")
    total.give(streams)
    for tensor in ("ffn_in", "ffn_post", "ffn_comb", "expert_outputs"):
        shape, own = _typed(tensor, shapes, dtype)
        total.take(tensor, shape, "activation", own)

    return (
        choice.stage(name, block_kind(layer, dspark_taps=dspark_taps) + _CHOICE),
        experts.stage(f"{name}_experts", EXPERTS),
        total.stage(f"{name}_sum", EXPERT_SUM),
    )


def chooses_experts(spec: StageSpec) -> bool:
    """Whether a layer's stage ends with the choice of experts."""
    return spec.kind.endswith(_CHOICE)


def holds(spec: StageSpec, name: str) -> bool:
    """Whether a tensor of a layer, by its name in the checkpoint, is bound to this stage of it or baked into it."""
    if ".ffn.experts." in name:
        return not (chooses_experts(spec) or spec.kind == EXPERT_SUM)
    if ".ffn.shared_experts." in name:
        return not (chooses_experts(spec) or spec.kind == EXPERTS)
    return has_attention(spec)


def has_attention(spec: StageSpec) -> bool:
    """Whether a layer's stage is the whole layer or its first part."""
    return spec.kind not in (EXPERTS, EXPERT_SUM)


def _handed_on(config: ModelConfig) -> dict[str, Shape]:
    return {
        "ffn_in": (*TOKEN, config.dim),
        "ffn_post": (*TOKEN, config.hc_mult),
        "ffn_comb": (*TOKEN, config.hc_mult, config.hc_mult),
        "expert_ids": (*TOKEN, config.n_activated_experts),
        "expert_weights": (*TOKEN, config.n_activated_experts),
        "expert_outputs": (*TOKEN, config.n_activated_experts, config.dim),
    }


def _typed(tensor: str, shapes: dict[str, Shape], dtype: str) -> tuple[Shape, str]:
    own = {"ffn_post": "float32", "ffn_comb": "float32", "expert_ids": "int32", "expert_weights": "float32"}
    return shapes[tensor], own.get(tensor, dtype)
