"""Launch plan of `HyperConnectionMix`: partial sums over slices of the streams, then statistic and Sinkhorn."""

from __future__ import annotations

from engram_trt.plugins.hyper_connection_mix.spec import SPEC
from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    TRITON_NAME,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    lay_out_workspace,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner

BLOCK_TOKENS = 16
BLOCK_MIXES = 32
BLOCK_DIM = 64
SLICE_DIM = 1024
"""Stream elements one program sums. Fixed, so that a token's sum does not depend on the other tokens."""

MAX_STREAMS = 4
DIM_UNIT = 16

MODULE = "engram_trt.plugins.hyper_connection_mix.kernel"
DTYPES = ("float32", "bfloat16")


def project_variant(dtype: str) -> Variant:
    """The kernel that reads the streams, for one dtype."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="hyper_connection_project_kernel",
        signature=(
            ("hidden_states", f"*{TRITON_NAME[dtype]}"),
            ("hc_fn", "*fp32"),
            ("sums", "*fp32"),
            ("squares", "*fp32"),
            ("num_tokens", "i32"),
            ("hc_mixes", "i32"),
            ("dim_units", "i32"),
        ),
        constants=(
            ("UNIT", DIM_UNIT),
            ("SLICE_DIM", SLICE_DIM),
            ("BLOCK_TOKENS", BLOCK_TOKENS),
            ("BLOCK_MIXES", BLOCK_MIXES),
            ("BLOCK_DIM", BLOCK_DIM),
        ),
        num_warps=4,
        num_stages=4,
    )


MIX_VARIANT = Variant(
    op=SPEC.name,
    module=MODULE,
    function="hyper_connection_mix_kernel",
    signature=(
        ("sums", "*fp32"),
        ("squares", "*fp32"),
        ("hc_scale", "*fp32"),
        ("hc_base", "*fp32"),
        ("pre", "*fp32"),
        ("post", "*fp32"),
        ("comb", "*fp32"),
        ("num_tokens", "i32"),
        ("hc_mult", "i32"),
        ("slices", "i32"),
        ("hc_dim", "fp32"),
        ("iterations", "i32"),
        ("hc_eps", "fp32"),
        ("norm_eps", "fp32"),
    ),
    constants=(
        ("BLOCK_TOKENS", BLOCK_TOKENS),
        ("BLOCK_MIXES", BLOCK_MIXES),
        ("BLOCK_STREAMS", MAX_STREAMS),
    ),
    num_warps=4,
    unaligned=("hc_scale", "hc_base", "pre", "post", "comb"),
)


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    return (*(project_variant(dtype) for dtype in DTYPES), MIX_VARIANT)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """pre, post [batch, tokens, n] and comb [batch, tokens, n, n], float32."""
    batch, tokens, n, _ = info(SPEC.name, inputs, "hidden_states").shape
    weights = TensorInfo(shape=(batch, tokens, n), dtype="float32")
    return {
        "pre": weights,
        "post": weights,
        "comb": TensorInfo(shape=(batch, tokens, n, n), dtype="float32"),
    }


def _check(streams: int, dim: int, mixes: int, hc_dim: int) -> None:
    require(
        1 <= streams <= MAX_STREAMS,
        SPEC.name,
        "hidden_states shape",
        found=f"{streams} streams",
        expected=f"1 to {MAX_STREAMS}",
        remedy="The kernel holds one token's mixing matrix in registers.",
    )
    require(
        hc_dim == streams * dim and hc_dim % DIM_UNIT == 0,
        SPEC.name,
        "hc_fn shape",
        found=f"{hc_dim} columns",
        expected=f"{streams} streams x {dim}, a multiple of {DIM_UNIT}",
        remedy="Pass the projection of these streams.",
    )
    require(
        mixes == (2 + streams) * streams,
        SPEC.name,
        "hc_fn shape",
        found=f"{mixes} rows",
        expected=f"{(2 + streams) * streams}, (2+n)*n",
        remedy="Pass the projection of these streams.",
    )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Two launches: the streams are read once by the first, the second reads its sums."""
    hidden = info(SPEC.name, inputs, "hidden_states")
    batch, tokens, streams, dim = hidden.shape
    mixes, hc_dim = info(SPEC.name, inputs, "hc_fn").shape
    _check(streams, dim, mixes, hc_dim)
    num_tokens = batch * tokens
    if num_tokens == 0:
        return LaunchPlan(op=SPEC.name)
    slices = ceil_div(hc_dim, SLICE_DIM)
    workspace, workspace_bytes = lay_out_workspace(
        {
            "sums": TensorInfo(shape=(num_tokens, slices, BLOCK_MIXES), dtype="float32"),
            "squares": TensorInfo(shape=(num_tokens, slices), dtype="float32"),
        }
    )
    blocks = ceil_div(num_tokens, BLOCK_TOKENS)
    project = make_launch(
        project_variant(hidden.dtype),
        (blocks, slices, 1),
        {
            "hidden_states": "hidden_states",
            "hc_fn": "hc_fn",
            "sums": "sums",
            "squares": "squares",
            "num_tokens": num_tokens,
            "hc_mixes": mixes,
            "dim_units": hc_dim // DIM_UNIT,
        },
    )
    pointers = ("sums", "squares", "hc_scale", "hc_base", "pre", "post", "comb")
    mix = make_launch(
        MIX_VARIANT,
        (blocks, 1, 1),
        {
            **{name: name for name in pointers},
            "num_tokens": num_tokens,
            "hc_mult": streams,
            "slices": slices,
            "hc_dim": float(hc_dim),
            "iterations": int(attributes["hc_sinkhorn_iters"]),
            "hc_eps": float(attributes["hc_eps"]),
            "norm_eps": float(attributes["norm_eps"]),
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(project, mix), workspace=workspace, workspace_bytes=workspace_bytes)


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
