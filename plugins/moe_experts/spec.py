"""Contract of `MoEExperts`: choose experts per token and sum their outputs (spec 6.1, 6.2)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec

GROUP = 32
"""Inputs that share one E8M0 scale in a packed expert."""

EXPERT_OPERANDS = (
    Operand(
        name="experts_w1",
        dtype="W",
        shape=("experts", "inter", "dim_stored"),
        meaning="gate projections; packed: two FP4 codes a byte, low nibble first",
    ),
    Operand(name="experts_w2", dtype="W", shape=("experts", "dim", "inter_stored"), meaning="down projections"),
    Operand(name="experts_w3", dtype="W", shape=("experts", "inter", "dim_stored"), meaning="up projections"),
    Operand(
        name="experts_w1_scale",
        dtype="int8",
        shape=("experts", "inter", "dim_groups"),
        meaning="E8M0 bytes per 32 inputs, viewed as int8; present iff the weights are packed",
        optional=True,
    ),
    Operand(
        name="experts_w2_scale",
        dtype="int8",
        shape=("experts", "dim", "inter_groups"),
        meaning="likewise",
        optional=True,
    ),
    Operand(
        name="experts_w3_scale",
        dtype="int8",
        shape=("experts", "inter", "dim_groups"),
        meaning="likewise",
        optional=True,
    ),
)
"""The experts, bound as they are stored; every op that multiplies with them takes these, last."""

PRODUCT_ATTRIBUTES = (
    Attribute(name="swiglu_limit", kind="float", meaning="clamp of the two projections; 0 for none"),
    Attribute(
        name="activation_format",
        kind="int",
        meaning="-1, or the QuantizeDequantize format of both inputs",
    ),
)
"""What the products of every expert depend on."""

SPEC = PluginSpec(
    name="MoEExperts",
    inputs=(
        Operand(name="ffn_in", dtype="T", shape=("rows", "dim"), meaning="one row per token"),
        Operand(
            name="scores",
            dtype="float32",
            shape=("rows", "experts"),
            meaning="gate scores; routing weights come from these",
        ),
        Operand(
            name="selection_bias",
            dtype="float32",
            shape=("rows", "experts"),
            meaning="added to the scores for the choice only",
        ),
        *EXPERT_OPERANDS,
    ),
    outputs=(
        Operand(
            name="routed_output",
            dtype="float32",
            shape=("rows", "dim"),
            meaning="sum over the chosen experts in ascending expert id, each rounded to T first",
        ),
    ),
    attributes=(
        Attribute(name="n_activated_experts", kind="int", meaning="experts per token"),
        Attribute(name="norm_topk_prob", kind="int", meaning="1: divide the chosen scores by their sum + 1e-20"),
        Attribute(name="route_scale", kind="float", meaning="factor of every routing weight"),
        *PRODUCT_ATTRIBUTES,
    ),
)
