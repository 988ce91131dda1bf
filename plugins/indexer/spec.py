"""Contract of `Indexer`: score entries, pick candidate blocks and the top-k, in one op (spec 5.5)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec, Tolerance

PLAIN, CANDIDATE_SOURCE, CANDIDATE_USER = 0, 1, 2
"""Roles: selects from all visible entries; the same and also publishes candidate blocks; selects inside them."""

SPEC = PluginSpec(
    name="Indexer",
    inputs=(
        Operand(
            name="index_q",
            dtype="T",
            shape=("batch", "tokens", "index_heads", "index_head_dim"),
            meaning="index queries, rotated at the token's position",
        ),
        Operand(
            name="index_weights",
            dtype="T",
            shape=("batch", "tokens", "index_heads"),
            meaning="weight of each head, scaled by index_head_dim^-0.5 * index_n_heads^-0.5",
        ),
        Operand(
            name="index_keys",
            dtype="T",
            shape=("batch", "entries", "index_head_dim"),
            meaning="keys by entry, this step's already written",
        ),
        Operand(
            name="start_positions",
            dtype="int64",
            shape=("batch",),
            meaning="absolute position of the step's first token",
        ),
        Operand(
            name="visible_entries",
            dtype="int64",
            shape=("visible",),
            meaning="0, 1, 2, ...: at least as many as any token of the step can see; bounds the work by shape",
        ),
        Operand(
            name="candidate_blocks",
            dtype="int32",
            shape=("batch", "tokens", "candidate_topk_blocks"),
            meaning="blocks a candidate user may select from, -1 where none",
            optional=True,
        ),
    ),
    outputs=(
        Operand(
            name="topk_indices",
            dtype="int32",
            shape=("batch", "tokens", "index_topk"),
            meaning="selected entries ascending, then -1",
        ),
        Operand(
            name="candidate_blocks_out",
            dtype="int32",
            shape=("batch", "tokens", "candidate_topk_blocks"),
            meaning="candidate source only: chosen blocks ascending, then -1",
            optional=True,
        ),
    ),
    attributes=(
        Attribute(
            name="compress_ratio",
            kind="int",
            meaning="tokens per entry: entry j is visible iff j < (p+1)//ratio",
        ),
        Attribute(name="index_topk", kind="int", meaning="entries selected per token"),
        Attribute(name="role", kind="int", meaning="0 plain, 1 candidate source, 2 candidate user"),
        Attribute(name="candidate_topk_blocks", kind="int", meaning="blocks a candidate source keeps"),
        Attribute(name="candidate_block_size", kind="int", meaning="consecutive entries per block"),
    ),
    tolerance=Tolerance(rtol=0.0, atol=0.0),
)
