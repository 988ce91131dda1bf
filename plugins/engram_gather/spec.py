"""Contract of `EngramGather`: FP8 rows of an Engram table, dequantised (spec 3)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec, Tolerance

GROUP = 32
"""Features that share one E8M0 scale."""

SPEC = PluginSpec(
    name="EngramGather",
    inputs=(
        Operand(
            name="engram_ids",
            dtype="int64",
            shape=("batch", "tokens", "columns"),
            meaning="row of the table for each column; addresses need 64 bits",
        ),
        Operand(
            name="engram_rows",
            dtype="int8",
            shape=("rows", "engram_head_dim"),
            meaning="E4M3 bytes of the table, viewed as int8",
        ),
        Operand(
            name="engram_scales",
            dtype="int8",
            shape=("rows", "groups"),
            meaning="E8M0 bytes, one per 32 features, viewed as int8",
        ),
    ),
    outputs=(
        Operand(
            name="embeddings",
            dtype="T",
            shape=("batch", "tokens", "features"),
            meaning="rows concatenated in column order; exact in bfloat16",
        ),
    ),
    attributes=(Attribute(name="out_dtype", kind="int", meaning="ONNX data type of the output: 1 float, 16 bfloat16"),),
    tolerance=Tolerance(rtol=0.0, atol=0.0),
)
