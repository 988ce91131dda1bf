"""Launches that every op with experts shares: pairs grouped by expert, two up projections, one down projection.

A pair is a token and the slot of one of its experts. Pairs of an expert are put into tiles in token order; each tile
reads the expert's weights once.
"""

from __future__ import annotations

from dataclasses import dataclass

from engram_trt.plugins.kernels.checks import Inputs, info
from engram_trt.plugins.kernels.plan import (
    INTERPRET,
    TRITON_NAME,
    ConstantValue,
    Launch,
    TensorInfo,
    Variant,
    ceil_div,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes
from engram_trt.plugins.moe_experts.spec import GROUP
from engram_trt.plugins.quantize_dequantize.spec import GROUP_OF_FORMAT

OP = "MoEExperts"
"""The op whose kernels these are, whoever launches them: each is compiled once."""

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


def rounding_group(format: int) -> int:
    """Inputs rounded together, 32 where nothing is rounded."""
    return GROUP_OF_FORMAT.get(format, GROUP)


GROUP_VARIANT = Variant(
    op=OP,
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
        op=OP,
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
        constants=_product_constants(dtype, weights, (("FORMAT", format), ("GROUP", rounding_group(format)))),
        num_warps=8 if crowded else 4,
        num_stages=STAGES[dtype],
    )


def down_variant(dtype: str, weights: str) -> Variant:
    """The kernel of the down projection."""
    kind, stored = f"*{TRITON_NAME[dtype]}", f"*{TRITON_NAME[weights]}"
    return Variant(
        op=OP,
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


def shared_variants(sm: int) -> tuple[Variant, ...]:
    """Every variant of the kernels here."""
    found = [GROUP_VARIANT]
    for dtype in DTYPES:
        for weights in (PACKED, dtype):
            found.append(down_variant(dtype, weights))
            found += [up_variant(dtype, weights, format, sm) for format in FORMATS]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedProducts:
    """Sizes of one call.

    Args:
        rows, activated: tokens, and slots of each.
        dim, inter, experts: as in the contract.
        dtype, weights: of activations and stored experts.
        format: how inputs of products are rounded, -1 for not.
        swiglu_limit: as in the contract.
    """

    rows: int
    activated: int
    dim: int
    inter: int
    experts: int
    dtype: str
    weights: str
    format: int
    swiglu_limit: float

    @classmethod
    def of(cls, op: str, inputs: Inputs, attributes: Attributes, activated: int) -> GroupedProducts:
        """Sizes of checked inputs."""
        x, w1 = info(op, inputs, "ffn_in"), info(op, inputs, "experts_w1")
        return cls(
            rows=x.shape[0],
            activated=activated,
            dim=x.shape[1],
            inter=w1.shape[1],
            experts=w1.shape[0],
            dtype=x.dtype,
            weights=w1.dtype,
            format=int(attributes["activation_format"]),
            swiglu_limit=float(attributes["swiglu_limit"]),
        )

    @property
    def pairs(self) -> int:
        return self.rows * self.activated

    @property
    def packed(self) -> bool:
        return self.weights == PACKED

    @property
    def prepares(self) -> bool:
        """Whether the products read a rounded or reordered copy of the activations."""
        return self.packed or self.format >= 0

    @property
    def max_tiles(self) -> int:
        """The most tiles that grouping can make; the grids cover them."""
        return self.pairs // BLOCK_TOKENS + min(self.experts, self.pairs)

    def buffers(self) -> dict[str, TensorInfo]:
        """Workspace of these launches: `activations` is filled by the caller where `prepares`."""
        integers = TensorInfo(shape=(self.max_tiles,), dtype="int32")
        return {
            "activations": TensorInfo(shape=(self.rows if self.prepares else 0, self.dim), dtype=self.dtype),
            "sorted_pairs": TensorInfo(shape=(self.pairs,), dtype="int32"),
            "tile_expert": integers,
            "tile_first": integers,
            "tile_last": integers,
            "hidden": TensorInfo(shape=(self.pairs, self.inter), dtype=self.dtype),
        }

    def launches(self, chosen: str, routing: str, sm: int) -> tuple[Launch, Launch, Launch]:
        """Group, up, down: writes `expert_outputs` [pairs, dim] of every pair that has an expert.

        Args:
            chosen: int32 [pairs] expert ids; a pair whose id is not bound has no expert.
            routing: float32 [pairs] routing weights.
            sm: compute capability.
        """
        tiles = {name: name for name in ("sorted_pairs", "tile_expert", "tile_first", "tile_last")}
        group = make_launch(
            GROUP_VARIANT,
            (self.experts, 1, 1),
            {"chosen": chosen, **tiles, "num_pairs": self.pairs, "max_tiles": self.max_tiles},
        )
        # Float weights have no scales: the kernels do not read them, so any pointer will do.
        scale = "_scale" if self.packed else ""
        factor = 2 if self.packed else 1
        up = make_launch(
            up_variant(self.dtype, self.weights, self.format, sm),
            (ceil_div(self.inter, BLOCK_ROWS), self.max_tiles, 1),
            {
                "activations": "activations" if self.prepares else "ffn_in",
                "experts_w1": "experts_w1",
                "experts_w3": "experts_w3",
                "experts_w1_scale": f"experts_w1{scale}",
                "experts_w3_scale": f"experts_w3{scale}",
                "routing": routing,
                **tiles,
                "hidden": "hidden",
                "dim_units": self.dim // factor // STORED_UNIT,
                "inter": self.inter,
                "activated": self.activated,
                "swiglu_limit": self.swiglu_limit,
            },
        )
        down = make_launch(
            down_variant(self.dtype, self.weights),
            (ceil_div(self.dim, BLOCK_ROWS), self.max_tiles, 1),
            {
                "hidden": "hidden",
                "experts_w2": "experts_w2",
                "experts_w2_scale": f"experts_w2{scale}",
                **tiles,
                "expert_outputs": "expert_outputs",
                "inter_units": self.inter // factor // STORED_UNIT,
                "dim": self.dim,
            },
        )
        return group, up, down
