"""Launch plan of `CacheWrite`: rows are copied as words, whatever their dtype."""

from __future__ import annotations

from engram_trt.plugins.cache_write.spec import APPEND, RING, SPEC
from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    BYTES_OF,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner

VECTOR_BYTES = 16
BLOCK_ROWS = 4
BLOCK_WORDS = 256


def variant(*, vector: bool, mode: int) -> Variant:
    """The kernel for rows of whole 16-byte vectors (as int32 words), or for any row (as int16 words)."""
    word = "*i32" if vector else "*i16"
    return Variant(
        op=SPEC.name,
        module="engram_trt.plugins.cache_write.kernel",
        function="cache_write_kernel",
        signature=(
            ("cache", word),
            ("update", word),
            ("write_positions", "*i64"),
            ("num_rows", "i32"),
            ("rows_per_batch", "i32"),
            ("capacity", "i64"),
            ("width_units", "i32"),
        ),
        constants=(
            ("UNIT", VECTOR_BYTES // 4 if vector else 1),
            ("MODE", mode),
            ("BLOCK_ROWS", BLOCK_ROWS),
            ("BLOCK_WORDS", BLOCK_WORDS),
        ),
        unaligned=("write_positions",) if vector else ("cache", "update", "write_positions"),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    return tuple(variant(vector=vector, mode=mode) for vector in (True, False) for mode in (APPEND, RING))


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """The cache itself."""
    return {"cache_out": info(SPEC.name, inputs, "cache")}


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """One program copies `BLOCK_ROWS` rows, `BLOCK_WORDS` words at a time."""
    cache, update = info(SPEC.name, inputs, "cache"), info(SPEC.name, inputs, "update")
    mode = int(attributes["mode"])
    require(
        mode in (APPEND, RING),
        SPEC.name,
        "mode",
        found=str(mode),
        expected=f"{APPEND} (append) or {RING} (ring)",
        remedy="Pass one of the contract's modes.",
    )
    batch, rows, width = update.shape
    require(
        rows <= cache.shape[1],
        SPEC.name,
        "update rows",
        found=str(rows),
        expected=f"at most the cache's capacity of {cache.shape[1]}",
        remedy="Write the step in smaller chunks.",
    )
    row_bytes = width * BYTES_OF[cache.dtype]
    if batch * rows * row_bytes == 0:
        return LaunchPlan(op=SPEC.name)
    vector = row_bytes % VECTOR_BYTES == 0
    words = row_bytes // (4 if vector else 2)
    unit = VECTOR_BYTES // 4 if vector else 1
    step = make_launch(
        variant(vector=vector, mode=mode),
        (ceil_div(batch * rows, BLOCK_ROWS), 1, 1),
        {
            "cache": "cache",
            "update": "update",
            "write_positions": "write_positions",
            "num_rows": batch * rows,
            "rows_per_batch": rows,
            "capacity": cache.shape[1],
            "width_units": words // unit,
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(step,))


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
