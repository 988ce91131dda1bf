"""Contract of `SparseAttention`: one softmax with sink over window and selected rows (spec 5.6)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec

SPEC = PluginSpec(
    name="SparseAttention",
    inputs=(
        Operand(
            name="q",
            dtype="T",
            shape=("batch", "tokens", "heads", "head_dim"),
            meaning="queries, rotated at the token's position",
        ),
        Operand(
            name="window_kv",
            dtype="T",
            shape=("batch", "ring", "head_dim"),
            meaning="ring of K = V rows, this step's already written; slot = position mod ring",
        ),
        Operand(
            name="start_positions",
            dtype="int64",
            shape=("batch",),
            meaning="absolute position of the step's first token",
        ),
        Operand(name="attn_sink", dtype="float32", shape=("heads",), meaning="logit of the sink, not scaled"),
        Operand(
            name="compressed_kv",
            dtype="T",
            shape=("batch", "entries", "head_dim"),
            meaning="compressed K = V rows by entry; absent on layers that read the window only",
            optional=True,
        ),
        Operand(
            name="topk_indices",
            dtype="int32",
            shape=("batch", "tokens", "index_topk"),
            meaning="selected entries, -1 where none; a repeated entry counts twice",
            optional=True,
        ),
    ),
    outputs=(
        Operand(
            name="attention_output",
            dtype="T",
            shape=("batch", "tokens", "heads", "head_dim"),
            meaning="zeros where nothing is attended to",
        ),
    ),
    attributes=(
        Attribute(name="window_size", kind="int", meaning="positions a token sees back, itself included"),
        Attribute(name="softmax_scale", kind="float", meaning="head_dim^-0.5"),
    ),
)
