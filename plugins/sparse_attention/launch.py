"""Launch plan of `SparseAttention`: which tile, and into how many splits a token's key list is cut."""

from __future__ import annotations

from dataclasses import dataclass

from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    MULTIPROCESSORS,
    TRITON_NAME,
    LaunchPlan,
    TensorInfo,
    Variant,
    ceil_div,
    lay_out_workspace,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner
from engram_trt.plugins.sparse_attention.spec import SPEC

MODULE = "engram_trt.plugins.sparse_attention.kernel"
DTYPES = ("float32", "bfloat16")
WHOLE_DIM = 512
"""The released head width; its kernel needs no masks along the row."""

BLOCK_DIMS = (64, WHOLE_DIM)
DIM_UNIT = 16
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads and keys a program holds at once, and the warps and pipeline stages that suit them."""

    heads: int
    keys: int
    num_warps: int
    num_stages: int


NARROW = Tile(16, 32, 4, 2)
"""Few heads a program: many programs for few tokens."""

FLOAT32 = Tile(16, 16, 8, 1)
WIDE = {
    89: Tile(32, 32, 8, 2),
    90: Tile(64, 32, 8, 2),
    100: Tile(64, 32, 8, 2),
    103: Tile(64, 32, 8, 2),
    120: Tile(32, 32, 8, 2),
}
"""Many heads a program, by what the target's shared memory holds: each row is read once for all of them."""


def tiles(dtype: str, sm: int) -> tuple[Tile, ...]:
    """Tiles a plan may choose, widest first."""
    return (FLOAT32,) if dtype == "float32" else (WIDE[sm], NARROW)


def attend_variant(dtype: str, block_dim: int, tile: Tile, *, split: bool) -> Variant:
    """The attention kernel."""
    kind = f"*{TRITON_NAME[dtype]}"
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="sparse_attention_kernel",
        signature=(
            ("q", kind),
            ("window_kv", kind),
            ("start_positions", "*i64"),
            ("attn_sink", "*fp32"),
            ("compressed_kv", kind),
            ("topk_indices", "*i32"),
            ("attention_output", kind),
            ("partial_maximum", "*fp32"),
            ("partial_denominator", "*fp32"),
            ("partial_total", "*fp32"),
            ("tokens", "i32"),
            ("heads", "i32"),
            ("dim_units", "i32"),
            ("ring", "i32"),
            ("entries", "i32"),
            ("window_size", "i32"),
            ("index_topk", "i32"),
            ("blocks_per_split", "i32"),
            ("softmax_scale", "fp32"),
        ),
        constants=(
            ("UNIT", DIM_UNIT),
            ("BLOCK_HEADS", tile.heads),
            ("BLOCK_KEYS", tile.keys),
            ("BLOCK_DIM", block_dim),
            ("WHOLE", block_dim == WHOLE_DIM),
            ("SPLIT", split),
            ("PRECISION", "ieee"),
            (INTERPRET, False),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        unaligned=("start_positions", "attn_sink", "topk_indices", "partial_maximum", "partial_denominator"),
    )


def merge_variant(dtype: str, block_dim: int) -> Variant:
    """The kernel that merges the splits of a token."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="merge_splits_kernel",
        signature=(
            ("partial_maximum", "*fp32"),
            ("partial_denominator", "*fp32"),
            ("partial_total", "*fp32"),
            ("attn_sink", "*fp32"),
            ("attention_output", f"*{TRITON_NAME[dtype]}"),
            ("heads", "i32"),
            ("dim_units", "i32"),
            ("splits", "i32"),
        ),
        constants=(
            ("UNIT", DIM_UNIT),
            ("BLOCK_SPLITS", MAX_SPLITS),
            ("BLOCK_DIM", block_dim),
            (INTERPRET, False),
        ),
        unaligned=("partial_maximum", "partial_denominator", "attn_sink"),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    found = []
    for dtype in DTYPES:
        for block_dim in BLOCK_DIMS:
            choices = tiles(dtype, sm)
            found.append(attend_variant(dtype, block_dim, choices[0], split=False))
            found.append(attend_variant(dtype, block_dim, choices[-1], split=True))
            found.append(merge_variant(dtype, block_dim))
    return tuple(found)


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """As the queries."""
    return {"attention_output": info(SPEC.name, inputs, "q")}


def choose(dtype: str, sm: int, num_tokens: int, heads: int, window_size: int, index_topk: int) -> tuple[Tile, int]:
    """Tile and number of splits: whole key lists where the tokens fill the GPU, else enough splits to fill it."""
    wide, narrow = tiles(dtype, sm)[0], tiles(dtype, sm)[-1]
    if num_tokens * ceil_div(heads, wide.heads) >= MULTIPROCESSORS[sm]:
        return wide, 1
    blocks = ceil_div(window_size, narrow.keys) + ceil_div(index_topk, narrow.keys)
    wanted = ceil_div(MULTIPROCESSORS[sm], num_tokens * ceil_div(heads, narrow.heads))
    splits = max(1, min(wanted, blocks, MAX_SPLITS))
    # Rounding the blocks of a split up may leave splits without any.
    splits = ceil_div(blocks, ceil_div(blocks, splits))
    return (narrow, splits) if splits > 1 else (wide, 1)


def _check(inputs: Inputs, window_size: int) -> None:
    q, window = info(SPEC.name, inputs, "q"), info(SPEC.name, inputs, "window_kv")
    head_dim = q.shape[3]
    require(
        head_dim == WHOLE_DIM or (head_dim % DIM_UNIT == 0 and head_dim <= BLOCK_DIMS[0]),
        SPEC.name,
        "q shape",
        found=f"head_dim {head_dim}",
        expected=f"{WHOLE_DIM}, or a multiple of {DIM_UNIT} up to {BLOCK_DIMS[0]}",
        remedy="No kernel covers other widths.",
    )
    require(
        1 <= window_size <= window.shape[1],
        SPEC.name,
        "window_size",
        found=f"{window_size} with a ring of {window.shape[1]}",
        expected="at least 1 and at most the ring's slots",
        remedy="Give the ring at least window_size slots.",
    )
    require(
        (inputs.get("compressed_kv") is None) == (inputs.get("topk_indices") is None),
        SPEC.name,
        "topk_indices",
        found="only one of compressed_kv and topk_indices",
        expected="both or none",
        remedy="Pass the selection with the rows it selects from.",
    )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """One launch, or two where key lists are split."""
    window_size = int(attributes["window_size"])
    _check(inputs, window_size)
    q, window = info(SPEC.name, inputs, "q"), info(SPEC.name, inputs, "window_kv")
    compressed, selected = inputs.get("compressed_kv"), inputs.get("topk_indices")
    batch, tokens, heads, head_dim = q.shape
    entries = compressed.shape[1] if compressed is not None else 0
    index_topk = selected.shape[2] if selected is not None and entries > 0 else 0
    if q.num_elements == 0:
        return LaunchPlan(op=SPEC.name)
    tile, splits = choose(q.dtype, sm, batch * tokens, heads, window_size, index_topk)
    block_dim = next(width for width in BLOCK_DIMS if head_dim <= width)
    blocks = ceil_div(window_size, tile.keys) + ceil_div(index_topk, tile.keys)
    parts = batch * tokens * splits * heads if splits > 1 else 0
    statistics = TensorInfo(shape=(parts,), dtype="float32")
    workspace, workspace_bytes = lay_out_workspace(
        {
            "partial_maximum": statistics,
            "partial_denominator": statistics,
            "partial_total": TensorInfo(shape=(parts, head_dim), dtype="float32"),
        }
    )
    # Without a selection the loop over it has no turns, so any pointer will do.
    attend = make_launch(
        attend_variant(q.dtype, block_dim, tile, split=splits > 1),
        (batch * tokens, ceil_div(heads, tile.heads), splits),
        {
            "q": "q",
            "window_kv": "window_kv",
            "start_positions": "start_positions",
            "attn_sink": "attn_sink",
            "compressed_kv": "compressed_kv" if index_topk else "window_kv",
            "topk_indices": "topk_indices" if index_topk else "start_positions",
            "attention_output": "attention_output",
            "partial_maximum": "partial_maximum",
            "partial_denominator": "partial_denominator",
            "partial_total": "partial_total",
            "tokens": tokens,
            "heads": heads,
            "dim_units": head_dim // DIM_UNIT,
            "ring": window.shape[1],
            "entries": entries,
            "window_size": window_size,
            "index_topk": index_topk,
            "blocks_per_split": ceil_div(blocks, splits),
            "softmax_scale": float(attributes["softmax_scale"]),
        },
    )
    if splits == 1:
        return LaunchPlan(op=SPEC.name, steps=(attend,), workspace=workspace, workspace_bytes=workspace_bytes)
    merge = make_launch(
        merge_variant(q.dtype, block_dim),
        (batch * tokens, heads, 1),
        {
            "partial_maximum": "partial_maximum",
            "partial_denominator": "partial_denominator",
            "partial_total": "partial_total",
            "attn_sink": "attn_sink",
            "attention_output": "attention_output",
            "heads": heads,
            "dim_units": head_dim // DIM_UNIT,
            "splits": splits,
        },
    )
    return LaunchPlan(op=SPEC.name, steps=(attend, merge), workspace=workspace, workspace_bytes=workspace_bytes)


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
