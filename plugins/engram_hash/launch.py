"""Launch plan of `EngramHash`."""

from __future__ import annotations

from engram_trt.plugins.engram_hash.spec import SPEC
from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import LaunchPlan, TensorInfo, Variant, ceil_div, make_launch
from engram_trt.plugins.kernels.planner import Attributes, Planner

BLOCK_TOKENS = 32
BLOCK_HEADS = 8

VARIANT = Variant(
    op=SPEC.name,
    module="engram_trt.plugins.engram_hash.kernel",
    function="engram_hash_kernel",
    signature=(
        ("compressed_ids", "*i64"),
        ("token_history", "*i64"),
        ("multipliers", "*i64"),
        ("primes", "*i64"),
        ("offsets", "*i64"),
        ("hash_ids", "*i64"),
        ("num_tokens", "i32"),
        ("tokens_per_batch", "i32"),
        ("history", "i32"),
        ("heads", "i32"),
        ("pad_id", "i64"),
    ),
    constants=(("BLOCK_TOKENS", BLOCK_TOKENS), ("BLOCK_HEADS", BLOCK_HEADS)),
    num_warps=4,
    unaligned=("compressed_ids", "token_history", "multipliers", "primes", "offsets"),
)


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    return (VARIANT,)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[batch, tokens, engram_layers, columns] int64."""
    tokens = info(SPEC.name, inputs, "compressed_ids").shape
    columns = info(SPEC.name, inputs, "offsets").shape
    return {"hash_ids": TensorInfo(shape=(*tokens, *columns), dtype="int64")}


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """One program hashes `BLOCK_TOKENS` tokens for one Engram layer."""
    batch, tokens = info(SPEC.name, inputs, "compressed_ids").shape
    layers, ngram = info(SPEC.name, inputs, "multipliers").shape
    _, history, heads = info(SPEC.name, inputs, "primes").shape
    columns = info(SPEC.name, inputs, "offsets").shape[1]
    require(
        ngram == history + 1,
        SPEC.name,
        "multipliers shape",
        found=f"{ngram} factors a layer",
        expected=f"{history + 1}, one more than the history",
        remedy="Pass the constants of one model.",
    )
    require(
        columns == history * heads,
        SPEC.name,
        "offsets shape",
        found=f"{columns} columns",
        expected=f"{history * heads}, n-gram sizes times heads",
        remedy="Pass the constants of one model.",
    )
    if batch * tokens * layers * columns == 0:
        return LaunchPlan(op=SPEC.name)
    arguments: dict[str, str | int | float] = {name: name for name, kind in VARIANT.signature if kind.startswith("*")}
    step = make_launch(
        VARIANT,
        (ceil_div(batch * tokens, BLOCK_TOKENS), layers, 1),
        {
            **arguments,
            "num_tokens": batch * tokens,
            "tokens_per_batch": tokens,
            "history": history,
            "heads": heads,
            "pad_id": int(attributes["pad_id"]),
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(step,))


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
