"""Launch plans are data: computed without Triton, covered by the enumerated variants, refused when out of contract."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.engram_gather.launch import plan_shards
from engram_trt.plugins.indexer import launch as indexer_launch
from engram_trt.plugins.kernels.plan import (
    LaunchPlan,
    Pointer,
    TensorInfo,
    lay_out_workspace,
    make_launch,
    pack_arguments,
)
from engram_trt.plugins.kernels.registry import PLANNERS, all_variants, planner_of
from engram_trt.plugins.registry import SPECS
from engram_trt.plugins.sparse_attention.launch import choose

Call = tuple[str, dict[str, TensorInfo | None], dict[str, int | float]]
TARGETS = (89, 90, 100, 103, 120)


def info(dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(shape=shape, dtype=dtype)


def gather_call(out_dtype: int = 16, rows: int = 384_016_682) -> Call:
    tensors: dict[str, TensorInfo | None] = {
        "engram_ids": info("int64", 2, 3, 24),
        "engram_rows": info("int8", rows, 256),
        "engram_scales": info("int8", rows, 8),
    }
    return "EngramGather", tensors, {"out_dtype": out_dtype}


def attention_call(dtype: str, batch: int, tokens: int, dim: int = 512, topk: int = 512) -> Call:
    tensors: dict[str, TensorInfo | None] = {
        "q": info(dtype, batch, tokens, 64, dim),
        "window_kv": info(dtype, batch, 256, dim),
        "start_positions": info("int64", batch),
        "attn_sink": info("float32", 64),
        "compressed_kv": info(dtype, batch, 5000, dim) if topk else None,
        "topk_indices": info("int32", batch, tokens, topk) if topk else None,
    }
    return "SparseAttention", tensors, {"window_size": 128, "softmax_scale": dim**-0.5}


def experts_call(dtype: str, weights: str, rows: int, format: int) -> Call:
    experts, dim, inter = 384, 5120, 2304
    half = 2 if weights == "int8" else 1
    tensors: dict[str, TensorInfo | None] = {
        "ffn_in": info(dtype, rows, dim),
        "scores": info("float32", rows, experts),
        "selection_bias": info("float32", rows, experts),
        "experts_w1": info(weights, experts, inter, dim // half),
        "experts_w2": info(weights, experts, dim, inter // half),
        "experts_w3": info(weights, experts, inter, dim // half),
    }
    for name, shape in (("w1", (inter, dim)), ("w2", (dim, inter)), ("w3", (inter, dim))):
        scale = info("int8", experts, shape[0], shape[1] // 32)
        tensors[f"experts_{name}_scale"] = scale if weights == "int8" else None
    attributes = {
        "n_activated_experts": 6,
        "norm_topk_prob": 1,
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "activation_format": format,
    }
    return "MoEExperts", tensors, attributes


def expert_outputs_call(dtype: str, weights: str, rows: int, format: int) -> Call:
    _, tensors, attributes = experts_call(dtype, weights, rows, format)
    routed: dict[str, TensorInfo | None] = {
        "ffn_in": tensors["ffn_in"],
        "expert_ids": info("int32", rows, 6),
        "expert_weights": info("float32", rows, 6),
    }
    routed |= {name: tensor for name, tensor in tensors.items() if name.startswith("experts_")}
    return "MoEExpertOutputs", routed, {name: attributes[name] for name in ("swiglu_limit", "activation_format")}


def index_call(dtype: str, role: int, tokens: int, visible: int) -> Call:
    tensors: dict[str, TensorInfo | None] = {
        "index_q": info(dtype, 1, tokens, 32, 128),
        "index_weights": info(dtype, 1, tokens, 32),
        "index_keys": info(dtype, 1, max(visible, 1), 128),
        "start_positions": info("int64", 1),
        "visible_entries": info("int64", visible),
        "candidate_blocks": info("int32", 1, tokens, 2048) if role == 2 else None,
    }
    attributes = {
        "compress_ratio": 1,
        "index_topk": 512,
        "role": role,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
    }
    return "Indexer", tensors, attributes


def small_calls() -> Iterator[Call]:
    """Calls of the four simple ops."""
    for dtype, width, mode in itertools.product(("float32", "bfloat16", "int64"), (5, 128), (0, 1)):
        cache = {"cache": info(dtype, 2, 9, width), "update": info(dtype, 2, 4, width)}
        yield "CacheWrite", {**cache, "write_positions": info("int64", 2)}, {"mode": mode}
    for dtype, format in itertools.product(("float32", "bfloat16"), (0, 1, 2)):
        yield "QuantizeDequantize", {"x": info(dtype, 7, 96)}, {"format": format}
    hashed: dict[str, TensorInfo | None] = {
        "compressed_ids": info("int64", 2, 7),
        "token_history": info("int64", 2, 3),
        "multipliers": info("int64", 2, 4),
        "primes": info("int64", 2, 3, 8),
        "offsets": info("int64", 2, 24),
    }
    yield "EngramHash", hashed, {"pad_id": 2}
    for dtype in ("float32", "bfloat16"):
        mixed: dict[str, TensorInfo | None] = {
            "hidden_states": info(dtype, 1, 9, 4, 5120),
            "hc_fn": info("float32", 24, 20480),
            "hc_scale": info("float32", 3),
            "hc_base": info("float32", 24),
        }
        yield "HyperConnectionMix", mixed, {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    yield gather_call(1)
    yield gather_call(16)


def calls() -> Iterator[Call]:
    """Calls that together reach every choice a plan makes."""
    yield from small_calls()
    for dtype in ("float32", "bfloat16"):
        for batch, tokens in ((1, 1), (4, 3), (1, 4096)):
            for dim, topk in ((512, 512), (32, 0)):
                yield attention_call(dtype, batch, tokens, dim, topk)
        for weights in ("int8", dtype):
            for format in (-1, 0, 1, 2):
                yield experts_call(dtype, weights, 17, format)
                yield expert_outputs_call(dtype, weights, 17, format)
        for role, visible in itertools.product((0, 1, 2), (300, 40_000)):
            yield index_call(dtype, role, 3, visible)


def plan(call: Call, sm: int = 90) -> LaunchPlan:
    name, tensors, attributes = call
    return planner_of(name).plan(tensors, attributes, sm)


def test_every_op_has_a_planner_on_every_target() -> None:
    assert [planner.spec for planner in PLANNERS] == list(SPECS)
    for planner in PLANNERS:
        for sm in planner.spec.supported_sms:
            assert planner.variants(sm)


@pytest.mark.parametrize("sm", TARGETS)
def test_plans_choose_enumerated_variants_and_reach_all_of_them(sm: int) -> None:
    enumerated = set(all_variants(sm))
    chosen = {step.variant for call in calls() for step in plan(call, sm).launches}
    chosen |= {
        step.variant for dtype in ("float32", "bfloat16") for step in plan_shards(100, 400, 100, 256, dtype).launches
    }
    chosen |= {step.variant for step in plan(short_candidates_call(), sm).launches}
    assert chosen - enumerated == set()
    assert enumerated - chosen == set()


def short_candidates_call() -> Call:
    name, tensors, attributes = index_call("bfloat16", 2, 3, 300)
    return name, {**tensors, "candidate_blocks": info("int32", 1, 3, 5)}, attributes


def test_labels_are_unique() -> None:
    labels = [variant.label for variant in all_variants(90)]
    assert len(set(labels)) == len(labels)


def test_launches_name_known_tensors() -> None:
    for call in calls():
        name, tensors, attributes = call
        planner, made = planner_of(name), plan(call)
        present = {key for key, value in tensors.items() if value is not None}
        known = present | set(planner.outputs(tensors, attributes)) | {buffer.name for buffer in made.workspace}
        used = {a.tensor for step in made.launches for a in step.arguments if isinstance(a, Pointer)}
        assert used <= known


def test_plans_need_neither_torch_nor_triton_nor_cuda() -> None:
    program = (
        "import sys; import engram_trt.plugins.kernels.registry; "
        "sys.exit(any(name in ('torch', 'triton', 'cuda') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_packed_arguments_end_in_two_null_pointers() -> None:
    step = plan(("QuantizeDequantize", {"x": info("float32", 7, 96)}, {"format": 0})).launches[0]
    values, types = pack_arguments(step, {"x": 4096, "y": 8192})
    assert values == (4096, 8192, 21, 0, 0)
    assert types == (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


def test_workspace_parts_do_not_overlap() -> None:
    buffers, total = lay_out_workspace({"a": info("int8", 3), "b": info("float32", 100), "c": info("int8", 1)})
    assert [buffer.offset_bytes for buffer in buffers] == [0, 256, 768]
    assert total == 1024


def test_indexer_bounds_its_workspace_by_splitting_tokens() -> None:
    made = plan(index_call("bfloat16", 1, 16_384, 1_048_576))
    assert made.workspace_bytes <= indexer_launch.WORKSPACE_BYTES
    scores = [step for step in made.launches if step.variant.function == "index_scores_kernel"]
    assert len(scores) > 250


@pytest.mark.parametrize(
    ("batch", "tokens", "max_rows"), [(3, 5, 4), (3, 5, 5), (3, 5, 7), (3, 5, 11), (3, 5, 99), (1, 1, 1)]
)
def test_indexer_chunks_cover_every_token_once(batch: int, tokens: int, max_rows: int) -> None:
    seen: dict[tuple[int, int], int] = {}
    for chunk in indexer_launch.chunks(batch, tokens, max_rows):
        assert chunk.rows <= max_rows
        for row in range(chunk.batch_start, chunk.batch_start + chunk.num_batches):
            for token in range(chunk.token_start, chunk.token_start + chunk.num_tokens):
                seen[row, token] = seen.get((row, token), 0) + 1
    assert seen == {(row, token): 1 for row in range(batch) for token in range(tokens)}


def test_attention_splits_keys_for_few_tokens_only() -> None:
    assert choose("bfloat16", 90, 1, 64, 128, 512)[1] == 20
    assert choose("bfloat16", 90, 8, 64, 128, 512)[1] > 1
    assert choose("bfloat16", 90, 4096, 64, 128, 512)[1] == 1


REFUSED: Mapping[str, tuple[Call, int, str]] = {
    "target": (attention_call("bfloat16", 1, 1), 80, "SparseAttention: target"),
    "dtype": (
        ("QuantizeDequantize", {"x": info("int64", 1, 32)}, {"format": 0}),
        90,
        "QuantizeDequantize: x dtype",
    ),
    "mixed dtypes": (
        (
            "CacheWrite",
            {
                "cache": info("float32", 1, 4, 8),
                "update": info("bfloat16", 1, 2, 8),
                "write_positions": info("int64", 1),
            },
            {"mode": 0},
        ),
        90,
        "CacheWrite: update dtype",
    ),
    "rank": (("QuantizeDequantize", {"x": info("float32", 32)}, {"format": 0}), 90, "QuantizeDequantize: x shape"),
    "width": (
        ("QuantizeDequantize", {"x": info("float32", 1, 40)}, {"format": 0}),
        90,
        "QuantizeDequantize: width",
    ),
    "format": (
        ("QuantizeDequantize", {"x": info("float32", 1, 32)}, {"format": 3}),
        90,
        "QuantizeDequantize: format",
    ),
    "mode": (
        (
            "CacheWrite",
            {
                "cache": info("float32", 1, 4, 8),
                "update": info("float32", 1, 2, 8),
                "write_positions": info("int64", 1),
            },
            {"mode": 2},
        ),
        90,
        "CacheWrite: mode",
    ),
    "more rows than slots": (
        (
            "CacheWrite",
            {
                "cache": info("float32", 1, 4, 8),
                "update": info("float32", 1, 5, 8),
                "write_positions": info("int64", 1),
            },
            {"mode": 1},
        ),
        90,
        "CacheWrite: update rows",
    ),
    "extents": (
        (
            "CacheWrite",
            {
                "cache": info("float32", 1, 4, 8),
                "update": info("float32", 2, 2, 8),
                "write_positions": info("int64", 2),
            },
            {"mode": 0},
        ),
        90,
        "CacheWrite: update shape",
    ),
    "head width": (attention_call("bfloat16", 1, 1, dim=96), 90, "SparseAttention: q shape"),
    "output dtype": (gather_call(out_dtype=10), 90, "EngramGather: out_dtype"),
    "role": (index_call("bfloat16", 3, 1, 100), 90, "Indexer: role"),
    "missing attribute": (("QuantizeDequantize", {"x": info("float32", 1, 32)}, {}), 90, "attributes"),
    "missing input": (("CacheWrite", {"cache": info("float32", 1, 4, 8)}, {"mode": 0}), 90, "CacheWrite: update"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_op_and_argument(case: str) -> None:
    (name, tensors, attributes), sm, where = REFUSED[case]
    with pytest.raises(KernelError) as caught:
        planner_of(name).plan(tensors, attributes, sm)
    assert where in caught.value.where
    assert caught.value.found
    assert caught.value.expected


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"candidate_blocks": None}, "candidate_blocks"),
        ({"candidate_blocks": info("int32", 1, 3, 4096)}, "candidate_blocks shape"),
        ({"index_q": info("bfloat16", 1, 3, 32, 256), "index_keys": info("bfloat16", 1, 300, 256)}, "index_q shape"),
        ({"visible_entries": info("int64", 301)}, "visible_entries shape"),
    ],
)
def test_indexer_refuses(change: dict[str, TensorInfo | None], where: str) -> None:
    name, tensors, attributes = index_call("bfloat16", 2, 3, 300)
    with pytest.raises(KernelError, match=where):
        planner_of(name).plan({**tensors, **change}, attributes, 90)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"experts_w1_scale": None}, "experts_w1_scale"),
        ({"experts_w2_scale": info("int8", 384, 5120, 71)}, "experts_w2_scale shape"),
        ({"experts_w2": info("int8", 384, 5120, 1151)}, "experts shape"),
    ],
)
def test_experts_refuse(change: dict[str, TensorInfo | None], where: str) -> None:
    for name, tensors, attributes in (
        experts_call("bfloat16", "int8", 3, 0),
        expert_outputs_call("bfloat16", "int8", 3, 0),
    ):
        with pytest.raises(KernelError, match=where) as caught:
            planner_of(name).plan({**tensors, **change}, attributes, 90)
        assert caught.value.where.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"expert_ids": info("int64", 3, 6)}, "expert_ids dtype"),
        ({"expert_ids": info("int32", 3, 0), "expert_weights": info("float32", 3, 0)}, "expert_ids shape"),
        ({"expert_weights": info("float32", 3, 5)}, "expert_weights shape"),
        ({"expert_weights": info("bfloat16", 3, 6)}, "expert_weights dtype"),
        ({"ffn_in": info("bfloat16", 4, 5120)}, "expert_ids shape"),
    ],
)
def test_expert_outputs_refuse(change: dict[str, TensorInfo | None], where: str) -> None:
    name, tensors, attributes = expert_outputs_call("bfloat16", "int8", 3, 0)
    with pytest.raises(KernelError, match=f"MoEExpertOutputs: {where}"):
        planner_of(name).plan({**tensors, **change}, attributes, 90)


@pytest.mark.parametrize("name", ["MoEExperts", "MoEExpertOutputs"])
def test_as_many_experts_as_kernels_can_group(name: str) -> None:
    call = {"MoEExperts": experts_call, "MoEExpertOutputs": expert_outputs_call}[name]
    _, tensors, attributes = call("bfloat16", "bfloat16", 3, -1)

    def of(experts: int) -> dict[str, TensorInfo | None]:
        found = dict(tensors)
        for operand in planner_of(name).spec.inputs:
            tensor = tensors[operand.name]
            if tensor is not None and "experts" in operand.shape:
                axis = operand.shape.index("experts")
                shape = (*tensor.shape[:axis], experts, *tensor.shape[axis + 1 :])
                found[operand.name] = info(tensor.dtype, *shape)
        return found

    assert planner_of(name).plan(of(512), attributes, 90).launches
    for experts in (0, 513):
        with pytest.raises(KernelError, match=f"{name}: experts"):
            planner_of(name).plan(of(experts), attributes, 90)


def test_launch_refuses_wrong_arguments_and_empty_grids() -> None:
    variant = plan(gather_call()).launches[0].variant
    with pytest.raises(ValueError, match="arguments"):
        make_launch(variant, (1, 1, 1), {"engram_ids": "engram_ids"})
    arguments: dict[str, Any] = {name: name if kind.startswith("*") else 1 for name, kind in variant.signature}
    with pytest.raises(ValueError, match="grid"):
        make_launch(variant, (0, 1, 1), arguments)
