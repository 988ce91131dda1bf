"""Launch plan of `MoEExperts`: choose, group, up projections, down projection, sum."""

from __future__ import annotations

from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    TRITON_NAME,
    ConstantValue,
    Launch,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    lay_out_workspace,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.moe_experts.spec import GROUP, SPEC
from engram_trt.plugins.quantize_dequantize.launch import check_format
from engram_trt.plugins.quantize_dequantize.spec import GROUP_OF_FORMAT

MODULE = "engram_trt.plugins.moe_experts.kernel"
PACKED = "int8"
DTYPES = ("float32", "bfloat16")
FORMATS = (-1, *GROUP_OF_FORMAT)

MAX_EXPERTS = 512
BLOCK_TOKENS = 16
"""Tokens of a tile. One value for every batch size: a token's bits must not depend on its batch mates."""

BLOCK_ROWS = 64
BLOCK_PAIRS = 1024
BLOCK_PREPARE = 1024
BLOCK_SUM = 1024
STORED_UNIT = 16
"""Stored columns of a weight row are whole 16-byte vectors of packed codes (32 inputs)."""

BLOCK_K = {
    ("bfloat16", PACKED): 64,
    ("bfloat16", "bfloat16"): 64,
    ("float32", PACKED): 16,
    ("float32", "float32"): 32,
}
"""Stored columns per step of a product, by the dtypes of activations and weights."""

STAGES = {"bfloat16": 4, "float32": 2}
WITHOUT_WARPGROUP_PRODUCTS = (89, 120)
"""Targets whose products take both operands from registers: two unpacked matrices need twice the warps there."""


def _group(format: int) -> int:
    return GROUP_OF_FORMAT.get(format, GROUP)


def choose_variant(dtype: str, packed: bool, format: int) -> Variant:
    """The kernel that chooses experts and prepares activations."""
    kind = f"*{TRITON_NAME[dtype]}"
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="choose_experts_kernel",
        signature=(
            ("ffn_in", kind),
            ("scores", "*fp32"),
            ("selection_bias", "*fp32"),
            ("activations", kind),
            ("chosen", "*i32"),
            ("routing", "*fp32"),
            ("dim", "i32"),
            ("experts", "i32"),
            ("activated", "i32"),
            ("norm_topk_prob", "i32"),
            ("route_scale", "fp32"),
        ),
        constants=(
            ("PREPARE", packed or format >= 0),
            ("PACKED", packed),
            ("FORMAT", format),
            ("GROUP", _group(format)),
            ("BLOCK_EXPERTS", MAX_EXPERTS),
            ("BLOCK_DIM", BLOCK_PREPARE),
            (INTERPRET, False),
        ),
        unaligned=("scores", "selection_bias"),
    )


GROUP_VARIANT = Variant(
    op=SPEC.name,
    module=MODULE,
    function="group_by_expert_kernel",
    signature=(
        ("chosen", "*i32"),
        ("sorted_pairs", "*i32"),
        ("tile_expert", "*i32"),
        ("tile_first", "*i32"),
        ("tile_last", "*i32"),
        ("num_pairs", "i32"),
        ("max_tiles", "i32"),
    ),
    constants=(
        ("BLOCK_EXPERTS", MAX_EXPERTS),
        ("BLOCK_PAIRS", BLOCK_PAIRS),
        ("BLOCK_TOKENS", BLOCK_TOKENS),
    ),
)


def _product_constants(
    dtype: str, weights: str, extra: tuple[tuple[str, ConstantValue], ...]
) -> tuple[tuple[str, ConstantValue], ...]:
    return (
        ("UNIT", STORED_UNIT),
        ("PACKED", weights == PACKED),
        *extra,
        ("BLOCK_TOKENS", BLOCK_TOKENS),
        ("BLOCK_ROWS", BLOCK_ROWS),
        ("BLOCK_K", BLOCK_K[dtype, weights]),
        ("PRECISION", "tf32x3"),
        (INTERPRET, False),
    )


def up_variant(dtype: str, weights: str, format: int, sm: int) -> Variant:
    """The kernel of the two up projections; `weights` is the experts' dtype, int8 for packed codes."""
    crowded = weights == PACKED and dtype == "bfloat16" and sm in WITHOUT_WARPGROUP_PRODUCTS
    kind, stored = f"*{TRITON_NAME[dtype]}", f"*{TRITON_NAME[weights]}"
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="expert_up_kernel",
        signature=(
            ("activations", kind),
            ("experts_w1", stored),
            ("experts_w3", stored),
            ("experts_w1_scale", "*i8"),
            ("experts_w3_scale", "*i8"),
            ("routing", "*fp32"),
            ("sorted_pairs", "*i32"),
            ("tile_expert", "*i32"),
            ("tile_first", "*i32"),
            ("tile_last", "*i32"),
            ("hidden", kind),
            ("dim_units", "i32"),
            ("inter", "i32"),
            ("activated", "i32"),
            ("swiglu_limit", "fp32"),
        ),
        constants=_product_constants(dtype, weights, (("FORMAT", format), ("GROUP", _group(format)))),
        num_warps=8 if crowded else 4,
        num_stages=STAGES[dtype],
    )


def down_variant(dtype: str, weights: str) -> Variant:
    """The kernel of the down projection."""
    kind, stored = f"*{TRITON_NAME[dtype]}", f"*{TRITON_NAME[weights]}"
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="expert_down_kernel",
        signature=(
            ("hidden", kind),
            ("experts_w2", stored),
            ("experts_w2_scale", "*i8"),
            ("sorted_pairs", "*i32"),
            ("tile_expert", "*i32"),
            ("tile_first", "*i32"),
            ("tile_last", "*i32"),
            ("expert_outputs", kind),
            ("inter_units", "i32"),
            ("dim", "i32"),
        ),
        constants=_product_constants(dtype, weights, ()),
        num_stages=STAGES[dtype],
    )


def sum_variant(dtype: str) -> Variant:
    """The kernel that sums a token's expert outputs."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="sum_experts_kernel",
        signature=(
            ("expert_outputs", f"*{TRITON_NAME[dtype]}"),
            ("routed_output", "*fp32"),
            ("dim", "i32"),
            ("activated", "i32"),
        ),
        constants=(("BLOCK_DIM", BLOCK_SUM),),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    found = [GROUP_VARIANT]
    for dtype in DTYPES:
        found.append(sum_variant(dtype))
        for weights in (PACKED, dtype):
            found.append(down_variant(dtype, weights))
            for format in FORMATS:
                found.append(choose_variant(dtype, weights == PACKED, format))
                found.append(up_variant(dtype, weights, format, sm))
    return tuple(found)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[rows, dim] float32."""
    return {"routed_output": TensorInfo(shape=info(SPEC.name, inputs, "ffn_in").shape, dtype="float32")}


def _check(inputs: Inputs, attributes: Attributes) -> None:
    x, w1 = info(SPEC.name, inputs, "ffn_in"), info(SPEC.name, inputs, "experts_w1")
    experts, inter, stored = w1.shape
    dim = x.shape[1]
    factor = 2 if w1.dtype == PACKED else 1
    require(
        w1.dtype in (PACKED, x.dtype),
        SPEC.name,
        "experts_w1 dtype",
        found=w1.dtype,
        expected=f"int8 (packed), or ffn_in's {x.dtype}",
        remedy="Convert the experts to the stage's dtype.",
    )
    columns = info(SPEC.name, inputs, "experts_w2").shape[2]
    require(
        stored * factor == dim and columns * factor == inter,
        SPEC.name,
        "experts shape",
        found=f"{stored} and {columns} stored columns ({w1.dtype})",
        expected=f"{dim // factor} and {inter // factor}, for dim {dim} and inter {inter}",
        remedy="Pass experts of this model.",
    )
    require(
        dim % (STORED_UNIT * factor) == 0 and inter % (STORED_UNIT * factor) == 0,
        SPEC.name,
        "experts shape",
        found=f"dim {dim}, inter {inter}",
        expected=f"multiples of {STORED_UNIT * factor}",
        remedy="No kernel covers other widths.",
    )
    activated = int(attributes["n_activated_experts"])
    require(
        1 <= activated <= experts <= MAX_EXPERTS,
        SPEC.name,
        "n_activated_experts",
        found=f"{activated} of {experts} experts",
        expected=f"1 <= activated <= experts <= {MAX_EXPERTS}",
        remedy="Activate experts that exist.",
    )
    for name in ("experts_w1_scale", "experts_w2_scale", "experts_w3_scale"):
        require(
            (inputs.get(name) is not None) == (w1.dtype == PACKED),
            SPEC.name,
            name,
            found="absent" if inputs.get(name) is None else "present",
            expected="scales with packed weights and only with them",
            remedy="Pass the scales that belong to the weights.",
        )
    format = int(attributes["activation_format"])
    if format != -1:
        check_format(SPEC.name, "activation_format", format, dim)
        check_format(SPEC.name, "activation_format", format, inter)


def _check_scales(inputs: Inputs, dim: int, inter: int) -> None:
    for name, width in (("experts_w1_scale", dim), ("experts_w2_scale", inter), ("experts_w3_scale", dim)):
        scale = inputs.get(name)
        require(
            scale is None or scale.shape[2] * GROUP == width,
            SPEC.name,
            f"{name} shape",
            found=str(scale),
            expected=f"{width // GROUP} groups",
            remedy="Pass one scale per 32 inputs.",
        )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Five launches; the products' grids cover the most tiles that grouping can make."""
    _check(inputs, attributes)
    x, w1 = info(SPEC.name, inputs, "ffn_in"), info(SPEC.name, inputs, "experts_w1")
    rows, dim = x.shape
    experts, inter, _ = w1.shape
    _check_scales(inputs, dim, inter)
    if rows * dim == 0:
        return LaunchPlan(op=SPEC.name)
    format = int(attributes["activation_format"])
    activated = int(attributes["n_activated_experts"])
    packed = w1.dtype == PACKED
    prepare = packed or format >= 0
    pairs = rows * activated
    max_tiles = pairs // BLOCK_TOKENS + min(experts, pairs)
    integers = TensorInfo(shape=(max_tiles,), dtype="int32")
    workspace, workspace_bytes = lay_out_workspace(
        {
            "activations": TensorInfo(shape=(rows if prepare else 0, dim), dtype=x.dtype),
            "chosen": TensorInfo(shape=(pairs,), dtype="int32"),
            "routing": TensorInfo(shape=(pairs,), dtype="float32"),
            "sorted_pairs": TensorInfo(shape=(pairs,), dtype="int32"),
            "tile_expert": integers,
            "tile_first": integers,
            "tile_last": integers,
            "hidden": TensorInfo(shape=(pairs, inter), dtype=x.dtype),
            "expert_outputs": TensorInfo(shape=(pairs, dim), dtype=x.dtype),
        }
    )
    choose = make_launch(
        choose_variant(x.dtype, packed, format),
        (rows, 1 + (ceil_div(dim, BLOCK_PREPARE) if prepare else 0), 1),
        {
            **{name: name for name in ("ffn_in", "scores", "selection_bias", "activations")},
            "chosen": "chosen",
            "routing": "routing",
            "dim": dim,
            "experts": experts,
            "activated": activated,
            "norm_topk_prob": int(attributes["norm_topk_prob"]),
            "route_scale": float(attributes["route_scale"]),
        },
    )
    tiles = {name: name for name in ("sorted_pairs", "tile_expert", "tile_first", "tile_last")}
    group = make_launch(
        GROUP_VARIANT,
        (experts, 1, 1),
        {"chosen": "chosen", **tiles, "num_pairs": pairs, "max_tiles": max_tiles},
    )
    products = _products(inputs, attributes, tiles, max_tiles, "activations" if prepare else "ffn_in", sm)
    total = make_launch(
        sum_variant(x.dtype),
        (rows, ceil_div(dim, BLOCK_SUM), 1),
        {
            "expert_outputs": "expert_outputs",
            "routed_output": "routed_output",
            "dim": dim,
            "activated": activated,
        },
    )
    return LaunchPlan(
        op=SPEC.name,
        steps=(choose, group, *products, total),
        workspace=workspace,
        workspace_bytes=workspace_bytes,
    )


def _products(
    inputs: Inputs, attributes: Attributes, tiles: dict[str, str], max_tiles: int, activations: str, sm: int
) -> tuple[Launch, Launch]:
    x, w1 = info(SPEC.name, inputs, "ffn_in"), info(SPEC.name, inputs, "experts_w1")
    dim = x.shape[1]
    inter, stored = w1.shape[1:]
    packed = w1.dtype == PACKED
    up = make_launch(
        up_variant(x.dtype, w1.dtype, int(attributes["activation_format"]), sm),
        (ceil_div(inter, BLOCK_ROWS), max_tiles, 1),
        {
            "activations": activations,
            "experts_w1": "experts_w1",
            "experts_w3": "experts_w3",
            # Float weights have no scales: the kernel does not read them, so any pointer will do.
            "experts_w1_scale": "experts_w1_scale" if packed else "experts_w1",
            "experts_w3_scale": "experts_w3_scale" if packed else "experts_w3",
            "routing": "routing",
            **tiles,
            "hidden": "hidden",
            "dim_units": stored // STORED_UNIT,
            "inter": inter,
            "activated": int(attributes["n_activated_experts"]),
            "swiglu_limit": float(attributes["swiglu_limit"]),
        },
    )
    down = make_launch(
        down_variant(x.dtype, w1.dtype),
        (ceil_div(dim, BLOCK_ROWS), max_tiles, 1),
        {
            "hidden": "hidden",
            "experts_w2": "experts_w2",
            "experts_w2_scale": "experts_w2_scale" if packed else "experts_w2",
            **tiles,
            "expert_outputs": "expert_outputs",
            "inter_units": (inter // 2 if packed else inter) // STORED_UNIT,
            "dim": dim,
        },
    )
    return up, down


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
