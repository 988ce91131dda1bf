"""Launch plan of `MoEExpertOutputs`: prepare, group, up projections, down projection."""

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
from engram_trt.plugins.moe_expert_outputs.spec import SPEC
from engram_trt.plugins.moe_experts.checks import check_experts
from engram_trt.plugins.moe_experts.grouped import (
    BLOCK_PREPARE,
    DTYPES,
    FORMATS,
    GroupedProducts,
    rounding_group,
    shared_variants,
)

MODULE = "engram_trt.plugins.moe_expert_outputs.kernel"


def prepare_variant(dtype: str, packed: bool, format: int) -> Variant:
    """The kernel that prepares activations and clears what no expert writes."""
    kind = f"*{TRITON_NAME[dtype]}"
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="prepare_rows_kernel",
        signature=(
            ("ffn_in", kind),
            ("expert_ids", "*i32"),
            ("activations", kind),
            ("expert_outputs", kind),
            ("dim", "i32"),
            ("experts", "i32"),
            ("activated", "i32"),
        ),
        constants=(
            ("PREPARE", packed or format >= 0),
            ("PACKED", packed),
            ("FORMAT", format),
            ("GROUP", rounding_group(format)),
            ("BLOCK_DIM", BLOCK_PREPARE),
            (INTERPRET, False),
        ),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    found = list(shared_variants(sm))
    for dtype in DTYPES:
        found += [prepare_variant(dtype, packed, format) for packed in (True, False) for format in FORMATS]
    return tuple(found)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[rows, activated, dim] in ffn_in's dtype."""
    x, ids = info(SPEC.name, inputs, "ffn_in"), info(SPEC.name, inputs, "expert_ids")
    return {"expert_outputs": TensorInfo(shape=(*ids.shape, x.shape[1]), dtype=x.dtype)}


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Four launches; the products' grids cover the most tiles that grouping can make."""
    check_experts(SPEC.name, inputs, attributes)
    activated = info(SPEC.name, inputs, "expert_ids").shape[1]
    require(
        activated >= 1,
        SPEC.name,
        "expert_ids shape",
        found="no slot",
        expected="at least one slot a token",
        remedy="Leave the call out where no expert is activated.",
    )
    sizes = GroupedProducts.of(SPEC.name, inputs, attributes, activated)
    if sizes.rows * sizes.dim == 0:
        return LaunchPlan(op=SPEC.name)
    workspace, workspace_bytes = lay_out_workspace(sizes.buffers())
    prepare = make_launch(
        prepare_variant(sizes.dtype, sizes.packed, sizes.format),
        (sizes.rows, ceil_div(sizes.dim, BLOCK_PREPARE), 1),
        {
            **{name: name for name in ("ffn_in", "expert_ids", "activations", "expert_outputs")},
            "dim": sizes.dim,
            "experts": sizes.experts,
            "activated": activated,
        },
    )
    return LaunchPlan(
        op=SPEC.name,
        steps=(prepare, *sizes.launches("expert_ids", "expert_weights", sm)),
        workspace=workspace,
        workspace_bytes=workspace_bytes,
    )


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
