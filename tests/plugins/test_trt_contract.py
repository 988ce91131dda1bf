"""Fields, shapes, dtypes, aliases and workspaces of the plugins, without TensorRT."""

from __future__ import annotations

import random

import pytest

from engram_trt.configs.errors import ArtifactError, KernelError
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, PLAIN
from engram_trt.plugins.indexer.spec import SPEC as INDEXER
from engram_trt.plugins.kernels.plan import TensorInfo
from engram_trt.plugins.registry import SPECS
from engram_trt.plugins.trt_contract import read_fields
from engram_trt.plugins.trt_plugins import OP_PLUGINS, plugin_abi, plugin_of
from engram_trt.plugins.trt_registration import plugin_identities, require_same_plugins

MIX_FIELDS = {"hc_sinkhorn_iters": ("int", [20]), "hc_eps": ("float", [1e-6]), "norm_eps": ("float", [1e-20])}


class Numbers:
    """Extents as plain integers."""

    def constant(self, value: int) -> int:
        return value

    def product(self, first: int, second: int) -> int:
        return first * second


def indexer_attributes(role: int) -> dict[str, int]:
    return {
        "compress_ratio": 2,
        "index_topk": 32,
        "role": role,
        "candidate_topk_blocks": 12,
        "candidate_block_size": 8,
    }


def test_every_op_has_a_plugin() -> None:
    assert {plugin.spec.name for plugin in OP_PLUGINS} == {spec.name for spec in SPECS}


def test_fields_in_the_contracts_order() -> None:
    shuffled = dict(reversed(MIX_FIELDS.items()))
    assert list(read_fields(plugin_of("HyperConnectionMix").spec, shuffled)) == list(MIX_FIELDS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hc_eps": None}, "missing hc_eps"),
        ({"extra": ("int", [1])}, "unknown extra"),
        ({"hc_eps": ("int", [1])}, "field hc_eps: found 1 value(s) of type int; expected one float"),
        ({"hc_sinkhorn_iters": ("float", [20.0])}, "field hc_sinkhorn_iters"),
        ({"norm_eps": ("float", [1.0, 2.0])}, "2 value(s) of type float"),
        ({"norm_eps": ("float", [])}, "0 value(s)"),
        ({"norm_eps": ("CHAR", [1])}, "of type CHAR"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, tuple[str, list[float]] | None], said: str) -> None:
    fields = {name: value for name, value in {**MIX_FIELDS, **change}.items() if value is not None}
    with pytest.raises(KernelError, match="HyperConnectionMix") as caught:
        read_fields(plugin_of("HyperConnectionMix").spec, fields)
    assert said in str(caught.value)


def test_gather_concatenates_columns() -> None:
    gather = plugin_of("EngramGather")
    shapes = [[2, 5, 48], [1000, 64], [1000, 2]]
    assert gather.output_shapes(shapes, {"out_dtype": 16}, Numbers()) == ((2, 5, 48 * 64),)
    assert gather.output_dtypes(["int64", "int8", "int8"], {"out_dtype": 16}) == ("bfloat16",)
    assert gather.output_dtypes(["int64", "int8", "int8"], {"out_dtype": 1}) == ("float32",)


def test_only_a_candidate_source_has_two_outputs() -> None:
    indexer = plugin_of("Indexer")
    shapes = [[3, 5, 8, 32], [3, 5, 8], [3, 70, 32], [3], [64]]
    for role in (PLAIN, CANDIDATE_USER):
        assert indexer.output_shapes(shapes, indexer_attributes(role), Numbers()) == ((3, 5, 32),)
    attributes = indexer_attributes(CANDIDATE_SOURCE)
    assert indexer.output_shapes(shapes, attributes, Numbers()) == ((3, 5, 32), (3, 5, 12))
    assert indexer.output_dtypes(["float32"] * 3, attributes) == ("int32", "int32")


def test_mix_has_three_float32_outputs() -> None:
    mix = plugin_of("HyperConnectionMix")
    shapes = [[2, 7, 4, 128], [24, 512], [3], [24]]
    assert mix.output_shapes(shapes, {}, Numbers()) == ((2, 7, 4), (2, 7, 4), (2, 7, 4, 4))
    assert mix.output_dtypes(["bfloat16", "float32", "float32", "float32"], {}) == ("float32",) * 3


def test_only_cache_writes_alias() -> None:
    assert plugin_of("CacheWrite").alias(0) == 0
    aliased = [
        plugin.spec.name for plugin in OP_PLUGINS if any(plugin.alias(n) >= 0 for n in range(len(plugin.spec.outputs)))
    ]
    assert aliased == ["CacheWrite"]


@pytest.mark.parametrize(
    ("position", "dtypes", "said"),
    [
        (0, ["float32"], None),
        (0, ["int8"], "q is int8, expected float32 or bfloat16"),
        (1, ["bfloat16", "float32"], "window_kv is float32, expected bfloat16"),
        (2, ["float32", "float32", "int32"], "start_positions is int32, expected int64"),
        (3, ["bfloat16", "bfloat16", "int64", "bfloat16"], "attn_sink is bfloat16, expected float32"),
        (4, ["bfloat16", "bfloat16", "int64", "float32", "bfloat16"], None),
        (4, ["bfloat16", "bfloat16", "int64", "float32", "float32"], "attention_output is float32, expected bfloat16"),
    ],
)
def test_dtypes_of_attention(position: int, dtypes: list[str], said: str | None) -> None:
    found = plugin_of("SparseAttention").accepts(position, dtypes, 4, {"window_size": 16, "softmax_scale": 0.1})
    assert found is None if said is None else found is not None and said in found


def attention_inputs(batch: int, tokens: int) -> dict[str, TensorInfo]:
    return {
        "q": TensorInfo(shape=(batch, tokens, 64, 512), dtype="bfloat16"),
        "window_kv": TensorInfo(shape=(batch, 264, 512), dtype="bfloat16"),
        "start_positions": TensorInfo(shape=(batch,), dtype="int64"),
        "attn_sink": TensorInfo(shape=(64,), dtype="float32"),
        "compressed_kv": TensorInfo(shape=(batch, 5000, 512), dtype="bfloat16"),
        "topk_indices": TensorInfo(shape=(batch, tokens, 512), dtype="int32"),
    }


def indexer_inputs(batch: int, tokens: int, visible: int, role: int) -> dict[str, TensorInfo]:
    found = {
        "index_q": TensorInfo(shape=(batch, tokens, 64, 128), dtype="bfloat16"),
        "index_weights": TensorInfo(shape=(batch, tokens, 64), dtype="bfloat16"),
        "index_keys": TensorInfo(shape=(batch, 200_000, 128), dtype="bfloat16"),
        "start_positions": TensorInfo(shape=(batch,), dtype="int64"),
        "visible_entries": TensorInfo(shape=(visible,), dtype="int64"),
    }
    if role == CANDIDATE_USER:
        found["candidate_blocks"] = TensorInfo(shape=(batch, tokens, 12), dtype="int32")
    return found


def test_attention_workspace_suffices_for_every_smaller_step() -> None:
    attributes = {"window_size": 128, "softmax_scale": 0.044}
    plugin = plugin_of("SparseAttention")
    for sm in plugin.spec.supported_sms:
        bound = plugin.workspace_bytes(attention_inputs(4, 256), attributes, [sm])
        for batch in (1, 2, 3, 4):
            for tokens in (*range(1, 40), 64, 100, 171, 255, 256):
                plan = plugin.planner.plan(attention_inputs(batch, tokens), attributes, sm)
                assert plan.workspace_bytes <= bound, (sm, batch, tokens)


@pytest.mark.parametrize("role", [PLAIN, CANDIDATE_SOURCE, CANDIDATE_USER])
def test_indexer_workspace_suffices_for_every_smaller_step(role: int) -> None:
    attributes, plugin = indexer_attributes(role), plugin_of("Indexer")
    bound = plugin.workspace_bytes(indexer_inputs(4, 512, 200_000, role), attributes, [90])
    random_source = random.Random(5)
    for _ in range(150):
        batch, tokens = random_source.randint(1, 4), random_source.randint(1, 512)
        visible = random_source.choice([1, 64, 50_000, 131_071, 150_000, 199_999, 200_000])
        plan = plugin.planner.plan(indexer_inputs(batch, tokens, visible, role), attributes, 90)
        assert plan.workspace_bytes <= bound, (batch, tokens, visible)


def test_kernels_of_a_node_hold_every_kernel_of_its_plans() -> None:
    for role in (PLAIN, CANDIDATE_SOURCE, CANDIDATE_USER):
        attributes, plugin = indexer_attributes(role), plugin_of("Indexer")
        inputs = indexer_inputs(2, 300, 200_000, role)
        offered = plugin.variants("bfloat16", len(inputs), attributes, 120)
        used = {launch.variant for launch in plugin.planner.plan(inputs, attributes, 120).launches}
        assert used <= set(offered)
        assert len(offered) < len(plugin.planner.variants(120))
    plugin, attributes = plugin_of("SparseAttention"), {"window_size": 128, "softmax_scale": 0.044}
    offered = plugin.variants("bfloat16", 6, attributes, 89)
    for tokens in (1, 7, 300):
        plan = plugin.planner.plan(attention_inputs(1, tokens), attributes, 89)
        assert {launch.variant for launch in plan.launches} <= set(offered)


EXPERT_PRODUCTS = {"swiglu_limit": 10.0, "activation_format": 0}


def expert_inputs(rows: int, experts: int, activated: int, packed: bool) -> dict[str, TensorInfo]:
    dim, inter, weights, half = 128, 96, "int8" if packed else "bfloat16", 2 if packed else 1
    found = {
        "ffn_in": TensorInfo(shape=(rows, dim), dtype="bfloat16"),
        "expert_ids": TensorInfo(shape=(rows, activated), dtype="int32"),
        "expert_weights": TensorInfo(shape=(rows, activated), dtype="float32"),
    }
    shapes = {"w1": (inter, dim), "w2": (dim, inter), "w3": (inter, dim)}
    for name, (outputs, inputs) in shapes.items():
        found[f"experts_{name}"] = TensorInfo(shape=(experts, outputs, inputs // half), dtype=weights)
    if packed:
        for name, (outputs, inputs) in shapes.items():
            found[f"experts_{name}_scale"] = TensorInfo(shape=(experts, outputs, inputs // 32), dtype="int8")
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_expert_outputs_have_a_row_a_slot_in_the_stages_dtype(packed: bool) -> None:
    plugin, inputs = plugin_of("MoEExpertOutputs"), expert_inputs(5, 8, 3, packed)
    shapes, dtypes = [list(tensor.shape) for tensor in inputs.values()], [t.dtype for t in inputs.values()]
    assert plugin.output_shapes(shapes, EXPERT_PRODUCTS, Numbers()) == ((5, 3, 128),)
    assert plugin.output_dtypes(dtypes, EXPERT_PRODUCTS) == ("bfloat16",)
    planned = plugin.planner.outputs(inputs, EXPERT_PRODUCTS)
    assert planned == {"expert_outputs": TensorInfo(shape=(5, 3, 128), dtype="bfloat16")}
    for position in range(len(inputs)):
        assert plugin.accepts(position, dtypes, len(inputs), EXPERT_PRODUCTS) is None
    said = plugin.accepts(1, ["bfloat16", "int64"], len(inputs), EXPERT_PRODUCTS)
    assert said == "MoEExpertOutputs: expert_ids is int64, expected int32"


@pytest.mark.parametrize("packed", [True, False])
def test_expert_workspace_suffices_for_fewer_rows_and_experts(packed: bool) -> None:
    plugin = plugin_of("MoEExpertOutputs")
    bound = plugin.workspace_bytes(expert_inputs(70, 40, 6, packed), EXPERT_PRODUCTS, [90])
    for rows in range(71):
        for experts in (1, 2, 16, 39, 40):
            plan = plugin.planner.plan(expert_inputs(rows, experts, 6, packed), EXPERT_PRODUCTS, 90)
            assert plan.workspace_bytes <= bound, (rows, experts)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("format", [-1, 0, 1, 2])
def test_kernels_of_an_expert_node_are_those_of_its_plan(packed: bool, format: int) -> None:
    plugin, attributes = plugin_of("MoEExpertOutputs"), {**EXPERT_PRODUCTS, "activation_format": format}
    inputs = expert_inputs(20, 8, 3, packed)
    plan = plugin.planner.plan(inputs, attributes, 120)
    assert [launch.variant.function for launch in plan.launches] == [
        "prepare_rows_kernel",
        "group_by_expert_kernel",
        "expert_up_kernel",
        "expert_down_kernel",
    ]
    offered = plugin.variants("bfloat16", len(inputs), attributes, 120)
    assert {launch.variant for launch in plan.launches} == set(offered)


def test_abi_tells_ops_apart_and_a_change_is_refused() -> None:
    assert len({plugin_abi(spec.name) for spec in SPECS}) == len(SPECS)
    require_same_plugins("here", plugin_identities())
    changed = plugin_identities()
    changed[INDEXER.name] = {**changed[INDEXER.name], "abi": "0" * 64}
    with pytest.raises(ArtifactError, match=r"plugin Indexer.*ABI 000000000000"):
        require_same_plugins("here", changed)
    with pytest.raises(ArtifactError, match="no such plugin"):
        require_same_plugins("here", {"Unheard": {"version": "1", "abi": "1"}})
