"""Contract of `MoEExpertOutputs`: chosen experts' outputs, token by token and slot by slot (spec 6.2).

The middle of `MoEExperts`, for experts that are spread over devices: the caller chooses before and sums after. A
device runs it over its own experts for the tokens sent to it. Summed in float32 from zero in ascending expert id, the
outputs give `MoEExperts` bit by bit.
"""

from engram_trt.plugins.moe_experts.spec import EXPERT_OPERANDS, PRODUCT_ATTRIBUTES
from engram_trt.plugins.spec import Operand, PluginSpec

NO_EXPERT = -1
"""Expert id of a slot whose expert is elsewhere; its output is zero."""

SPEC = PluginSpec(
    name="MoEExpertOutputs",
    inputs=(
        Operand(name="ffn_in", dtype="T", shape=("rows", "dim"), meaning="one row per token"),
        Operand(
            name="expert_ids",
            dtype="int32",
            shape=("rows", "activated"),
            meaning="index into the bound experts; -1 where a token has no expert here",
        ),
        Operand(
            name="expert_weights",
            dtype="float32",
            shape=("rows", "activated"),
            meaning="routing weights, multiplied in before w2; not read where the id is -1",
        ),
        *EXPERT_OPERANDS,
    ),
    outputs=(
        Operand(
            name="expert_outputs",
            dtype="T",
            shape=("rows", "activated", "dim"),
            meaning="output of the slot's expert; zeros where the id is -1",
        ),
    ),
    attributes=PRODUCT_ATTRIBUTES,
)
