"""Launch plan of `MoEExperts`: choose, group, up projections, down projection, sum."""

from __future__ import annotations

from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    TRITON_NAME,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    lay_out_workspace,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.moe_experts.checks import check_experts
from engram_trt.plugins.moe_experts.grouped import (
    BLOCK_PREPARE,
    DTYPES,
    FORMATS,
    MAX_EXPERTS,
    MODULE,
    GroupedProducts,
    rounding_group,
    shared_variants,
)
from engram_trt.plugins.moe_experts.spec import SPEC

BLOCK_SUM = 1024


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
            ("GROUP", rounding_group(format)),
            ("BLOCK_EXPERTS", MAX_EXPERTS),
            ("BLOCK_DIM", BLOCK_PREPARE),
            (INTERPRET, False),
        ),
        unaligned=("scores", "selection_bias"),
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
    found = list(shared_variants(sm))
    for dtype in DTYPES:
        found.append(sum_variant(dtype))
        found += [choose_variant(dtype, packed, format) for packed in (True, False) for format in FORMATS]
    return tuple(found)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[rows, dim] float32."""
    return {"routed_output": TensorInfo(shape=info(SPEC.name, inputs, "ffn_in").shape, dtype="float32")}


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Five launches; the products' grids cover the most tiles that grouping can make."""
    check_experts(SPEC.name, inputs, attributes)
    activated = int(attributes["n_activated_experts"])
    sizes = GroupedProducts.of(SPEC.name, inputs, attributes, activated)
    require(
        1 <= activated <= sizes.experts,
        SPEC.name,
        "n_activated_experts",
        found=f"{activated} of {sizes.experts} experts",
        expected=f"1 <= activated <= {sizes.experts}",
        remedy="Activate experts that exist.",
    )
    if sizes.rows * sizes.dim == 0:
        return LaunchPlan(op=SPEC.name)
    workspace, workspace_bytes = lay_out_workspace(
        {
            **sizes.buffers(),
            "chosen": TensorInfo(shape=(sizes.pairs,), dtype="int32"),
            "routing": TensorInfo(shape=(sizes.pairs,), dtype="float32"),
            "expert_outputs": TensorInfo(shape=(sizes.pairs, sizes.dim), dtype=sizes.dtype),
        }
    )
    choose = make_launch(
        choose_variant(sizes.dtype, sizes.packed, sizes.format),
        (sizes.rows, 1 + (ceil_div(sizes.dim, BLOCK_PREPARE) if sizes.prepares else 0), 1),
        {
            **{name: name for name in ("ffn_in", "scores", "selection_bias", "activations")},
            "chosen": "chosen",
            "routing": "routing",
            "dim": sizes.dim,
            "experts": sizes.experts,
            "activated": activated,
            "norm_topk_prob": int(attributes["norm_topk_prob"]),
            "route_scale": float(attributes["route_scale"]),
        },
    )
    total = make_launch(
        sum_variant(sizes.dtype),
        (sizes.rows, ceil_div(sizes.dim, BLOCK_SUM), 1),
        {
            "expert_outputs": "expert_outputs",
            "routed_output": "routed_output",
            "dim": sizes.dim,
            "activated": activated,
        },
    )
    return LaunchPlan(
        op=SPEC.name,
        steps=(choose, *sizes.launches("chosen", "routing", sm), total),
        workspace=workspace,
        workspace_bytes=workspace_bytes,
    )


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
