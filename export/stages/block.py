"""Stage `block_NN`: one layer. Which rows of the table a layer has follows from its role.

| input                                        | shape                             | when                             |
|----------------------------------------------|-----------------------------------|----------------------------------|
| hidden_states                                | batch, tokens, hc_mult, dim       | always                           |
| pre_mix (float32)                            | batch, tokens, hc_mult            | always: the mix attention reads  |
| start_positions (int64)                      | batch                             | always                           |
| image_mask (bool)                            | batch, tokens                     | the model has vision             |
| window_rotary_*, compress_rotary_* (float32) | batch, tokens, rope               | ratio 0, ratio above 0           |
| engram_ids (int64)                           | batch, tokens, columns            | Engram layer                     |
| engram_rows, engram_scales (int8)            | table_rows, ...                   | Engram layer: resident           |
| window_kv                                    | batch, window_ring, head_dim      | always: own state                |
| kv_state, score_state (float32)              | batch, state_ring, head_dim       | source of ratio 2: own state     |
| compressed_kv                                | batch, entries_rR, head_dim       | ratio above 0: the source's      |
| index_keys                                   | batch, entries_rR, index_head_dim | index source: the source's state |
| visible_entries_rR (int64)                   | visible_rR                        | index source                     |
| topk_indices (int32)                         | batch, tokens, index_topk         | reads the list of another layer  |
| candidate_blocks (int32)                     | batch, tokens, topk_blocks        | selects inside candidates        |
| experts_w1/w2/w3, experts_w1/w2/w3_scale     | experts, ...                      | always: resident                 |

| output                                       | when                                                                 |
|----------------------------------------------|----------------------------------------------------------------------|
| hidden_states_out, pre_mix_out               | always                                                               |
| window_kv_out                                | always; updates window_kv in place                                   |
| compressed_kv_out, index_keys_out            | kv source; in place                                                  |
| kv_state_out, score_state_out                | kv source of ratio 2; in place                                       |
| topk_indices                                 | index source                                                         |
| candidate_blocks                             | candidate source                                                     |
| dspark_tap                                   | DSpark target layer, if taps are on: mean of the streams at entry    |
"""

from __future__ import annotations

from dataclasses import replace

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import Role, Shape, StageSpec, TensorSpec
from engram_trt.export.stages.rotary_families import rotary_families
from engram_trt.plugins.engram_gather.spec import GROUP as ENGRAM_GROUP
from engram_trt.plugins.moe_experts.spec import GROUP as EXPERT_GROUP

TOKEN = ("batch", "tokens")


class BlockBuilder:
    """Collects a block's bindings; keeps the layer's id and the stage dtype at hand."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: str) -> None:
        self.config, self.layer, self.dtype = config, layer, dtype
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []

    def take(
        self, name: str, shape: Shape, role: Role, dtype: str | None = None, owner: int | None = None
    ) -> TensorSpec:
        """Add an input."""
        spec = TensorSpec(name=name, dtype=dtype or self.dtype, shape=shape, role=role, owner=owner)
        self.inputs.append(spec)
        return spec

    def give(self, source: TensorSpec) -> None:
        """Add the output that replaces an input: in place for a state, as a new tensor otherwise."""
        alias = source.name if source.role == "state" else None
        self.outputs.append(replace(source, name=f"{source.name}_out", tensor=source.tensor, alias=alias))

    def publish(self, name: str, shape: Shape, dtype: str, owner: int | None = None) -> None:
        """Add an output that other stages read under its own name."""
        self.outputs.append(TensorSpec(name=name, dtype=dtype, shape=shape, role="activation", owner=owner))

    def stage(self, name: str, kind: str) -> StageSpec:
        """A stage with what was added."""
        inputs, outputs = tuple(self.inputs), tuple(self.outputs)
        return StageSpec(name=name, kind=kind, layer_id=self.layer.layer_id, inputs=inputs, outputs=outputs)


def block_name(layer_id: int) -> str:
    """Stage name of a layer."""
    return f"block_{layer_id:02d}"


def block_spec(
    config: ModelConfig, layer: LayerConfig, dtype: str, *, packed_experts: bool, dspark_taps: bool
) -> StageSpec:
    """The table above for one layer.

    Args:
        config: the model.
        layer: the layer's role.
        dtype: stage dtype.
        packed_experts: routed experts are FP4 codes with scales, rather than floats.
        dspark_taps: DSpark target layers put out their input's mean.
    """
    build = BlockBuilder(config, layer, dtype)
    add_attention_half(build)
    add_experts(build, config.n_routed_experts, packed=packed_experts)
    add_tap(build, dspark_taps=dspark_taps)
    return build.stage(block_name(layer.layer_id), block_kind(layer, dspark_taps=dspark_taps))


def block_kind(layer: LayerConfig, *, dspark_taps: bool) -> str:
    """Kind of a layer's stage."""
    return layer.kind if dspark_taps else layer.kind.removesuffix("_tap")


def add_attention_half(build: BlockBuilder) -> None:
    """Everything but the experts and the tap."""
    _streams_and_step(build)
    _engram(build)
    _attention(build)


def add_tap(build: BlockBuilder, *, dspark_taps: bool) -> None:
    """The output of a DSpark target layer."""
    if build.layer.is_dspark_target and dspark_taps:
        build.publish("dspark_tap", (*TOKEN, build.config.dim), build.dtype, owner=build.layer.layer_id)


def add_experts(build: BlockBuilder, num_experts: int | str, *, packed: bool) -> None:
    """The routed experts; `num_experts` of them, or a symbol."""
    config, owner = build.config, build.layer.layer_id
    dim, inter = config.dim, config.moe_inter_dim
    for name, (rows, columns) in {"w1": (inter, dim), "w2": (dim, inter), "w3": (inter, dim)}.items():
        stored = columns // 2 if packed else columns
        dtype = "int8" if packed else build.dtype
        build.take(f"experts_{name}", (num_experts, rows, stored), "resident", dtype, owner)
        if packed:
            scales = (num_experts, rows, columns // EXPERT_GROUP)
            build.take(f"experts_{name}_scale", scales, "resident", "int8", owner)


def _streams_and_step(build: BlockBuilder) -> None:
    config = build.config
    streams = build.take("hidden_states", (*TOKEN, config.hc_mult, config.dim), "activation")
    pre_mix = build.take("pre_mix", (*TOKEN, config.hc_mult), "activation", "float32")
    build.give(streams)
    build.give(pre_mix)
    build.take("start_positions", ("batch",), "step", "int64")
    if config.has_vision:
        build.take("image_mask", TOKEN, "step", "bool")
    family = "compress" if build.layer.compress_ratio else "window"
    if family not in rotary_families(config):
        raise ValueError(f"layer {build.layer.layer_id}: no rotary table for ratio {build.layer.compress_ratio}")
    for part in ("cos", "sin"):
        build.take(f"{family}_rotary_{part}", (*TOKEN, config.rope_head_dim), "activation", "float32")


def _engram(build: BlockBuilder) -> None:
    if not build.layer.has_engram:
        return
    config, owner = build.config, build.layer.layer_id
    width = config.engram_head_dim
    build.take("engram_ids", (*TOKEN, config.engram_columns), "activation", "int64", owner)
    build.take("engram_rows", ("table_rows", width), "resident", "int8", owner)
    build.take("engram_scales", ("table_rows", width // ENGRAM_GROUP), "resident", "int8", owner)


def _attention(build: BlockBuilder) -> None:
    config, layer = build.config, build.layer
    owner, ratio = layer.layer_id, layer.compress_ratio
    build.give(build.take("window_kv", ("batch", "window_ring", config.head_dim), "state", owner=owner))
    if ratio == 0:
        return
    entries = ("batch", f"entries_r{ratio}")
    source = layer.kv_source
    compressed = build.take("compressed_kv", (*entries, config.head_dim), "state", owner=source)
    if layer.is_index_source:
        keys = build.take("index_keys", (*entries, config.index_head_dim), "state", owner=source)
        build.take(f"visible_entries_r{ratio}", (f"visible_r{ratio}",), "step", "int64")
    if layer.is_kv_source:
        build.give(compressed)
        build.give(keys)
    if layer.is_kv_source and ratio > 1:
        for name in ("kv_state", "score_state"):
            state = ("batch", "state_ring", config.head_dim)
            build.give(build.take(name, state, "state", "float32", owner))
    lists = (*TOKEN, config.index_topk)
    blocks = (*TOKEN, config.candidate_topk_blocks)
    if not layer.is_index_source:
        build.take("topk_indices", lists, "activation", "int32")
        return
    if layer.uses_candidates:
        build.take("candidate_blocks", blocks, "activation", "int32")
    build.publish("topk_indices", lists, "int32")
    if layer.is_candidate_source:
        build.publish("candidate_blocks", blocks, "int32")
