"""Launch plan of `EngramGather`, for one table and for a table in shards."""

from __future__ import annotations

from engram_trt.plugins.engram_gather.spec import GROUP, SPEC
from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    TRITON_NAME,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.spec import ONNX_BFLOAT16, ONNX_FLOAT

BLOCK_ROWS = 32
"""Rows a program has in flight."""

BLOCK_DIM = 256
DTYPE_OF_ONNX = {ONNX_FLOAT: "float32", ONNX_BFLOAT16: "bfloat16"}
"""By ONNX data type number. Not taken from `float_tables`, which needs torch."""


def variant(dtype: str, *, sharded: bool) -> Variant:
    """The kernel for one output dtype; a sharded table is a list of device addresses."""
    tables = (
        (("row_addresses", "*i64"), ("scale_addresses", "*i64"))
        if sharded
        else (("engram_rows", "*i8"), ("engram_scales", "*i8"))
    )
    return Variant(
        op=SPEC.name,
        module="engram_trt.plugins.engram_gather.kernel",
        function="engram_gather_shards_kernel" if sharded else "engram_gather_kernel",
        signature=(
            ("engram_ids", "*i64"),
            *tables,
            ("embeddings", f"*{TRITON_NAME[dtype]}"),
            ("num_ids", "i64"),
            ("table_rows", "i64"),
            *((("shard_rows", "i64"),) if sharded else ()),
            ("groups", "i32"),
        ),
        constants=(
            ("BLOCK_ROWS", BLOCK_ROWS),
            ("BLOCK_DIM", BLOCK_DIM),
            ("GROUP", GROUP),
            (INTERPRET, False),
        ),
        unaligned=("engram_ids", "row_addresses", "scale_addresses") if sharded else ("engram_ids",),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    return tuple(variant(dtype, sharded=sharded) for dtype in DTYPE_OF_ONNX.values() for sharded in (False, True))


def _out_dtype(attributes: Attributes) -> str:
    number = int(attributes["out_dtype"])
    require(
        number in DTYPE_OF_ONNX,
        SPEC.name,
        "out_dtype",
        found=str(number),
        expected=f"one of {sorted(DTYPE_OF_ONNX)}",
        remedy="Pass the ONNX number of float32 or bfloat16.",
    )
    return DTYPE_OF_ONNX[number]


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[batch, tokens, columns * engram_head_dim]."""
    batch, tokens, columns = info(SPEC.name, inputs, "engram_ids").shape
    dim = info(SPEC.name, inputs, "engram_rows").shape[1]
    shape = (batch, tokens, columns * dim)
    return {"embeddings": TensorInfo(shape=shape, dtype=_out_dtype(attributes))}


def check_dim(dim: int, groups: int) -> None:
    """Raise `KernelError` unless rows split into groups of 32 with one scale each."""
    require(
        dim == groups * GROUP,
        SPEC.name,
        "engram_scales shape",
        found=f"{groups} scales for rows of {dim}",
        expected=f"one scale per {GROUP} features",
        remedy="Pass the scales of this table.",
    )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """One program gathers `BLOCK_ROWS` rows."""
    ids, rows = info(SPEC.name, inputs, "engram_ids"), info(SPEC.name, inputs, "engram_rows")
    groups = info(SPEC.name, inputs, "engram_scales").shape[1]
    check_dim(rows.shape[1], groups)
    dtype = _out_dtype(attributes)
    if ids.num_elements * rows.shape[1] == 0:
        return LaunchPlan(op=SPEC.name)
    step = make_launch(
        variant(dtype, sharded=False),
        (ceil_div(ids.num_elements, BLOCK_ROWS), 1, 1),
        {
            "engram_ids": "engram_ids",
            "engram_rows": "engram_rows",
            "engram_scales": "engram_scales",
            "embeddings": "embeddings",
            "num_ids": ids.num_elements,
            "table_rows": rows.shape[0],
            "groups": groups,
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(step,))


def plan_shards(num_ids: int, table_rows: int, shard_rows: int, engram_head_dim: int, dtype: str) -> LaunchPlan:
    """Gather from a table whose shards lie at device addresses: shard s holds rows s*shard_rows and on.

    The launch names tensors `engram_ids` [num_ids] int64, `row_addresses` and `scale_addresses` [shards] int64
    (each address a multiple of 16), and writes `embeddings` [num_ids, engram_head_dim].

    Raises:
        KernelError: engram_head_dim is no multiple of 32, or shard_rows not positive.
    """
    require(
        engram_head_dim % GROUP == 0,
        SPEC.name,
        "engram_head_dim",
        found=str(engram_head_dim),
        expected=f"a multiple of {GROUP}",
        remedy="Pass the width of the table's rows.",
    )
    require(
        shard_rows > 0,
        SPEC.name,
        "shard_rows",
        found=str(shard_rows),
        expected="at least 1",
        remedy="Pass the rows of one shard.",
    )
    if num_ids == 0:
        return LaunchPlan(op=SPEC.name)
    step = make_launch(
        variant(dtype, sharded=True),
        (ceil_div(num_ids, BLOCK_ROWS), 1, 1),
        {
            "engram_ids": "engram_ids",
            "row_addresses": "row_addresses",
            "scale_addresses": "scale_addresses",
            "embeddings": "embeddings",
            "num_ids": num_ids,
            "table_rows": table_rows,
            "shard_rows": shard_rows,
            "groups": engram_head_dim // GROUP,
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(step,))


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
