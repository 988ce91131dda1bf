"""Contract of `EngramHash`: compressed token ids to rows of the Engram tables (spec 2.4)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec, Tolerance

DEAD = -1
"""Compressed id of a position that takes part in no n-gram: an image position, or one before the sequence."""

SPEC = PluginSpec(
    name="EngramHash",
    inputs=(
        Operand(
            name="compressed_ids",
            dtype="int64",
            shape=("batch", "tokens"),
            meaning="compressed id of each token, DEAD at image positions",
        ),
        Operand(
            name="token_history",
            dtype="int64",
            shape=("batch", "history"),
            meaning="the max_ngram_size-1 compressed ids before the step, oldest first, DEAD where none",
        ),
        Operand(
            name="multipliers",
            dtype="int64",
            shape=("engram_layers", "ngram"),
            meaning="odd factors, one per layer and look-back",
        ),
        Operand(
            name="primes",
            dtype="int64",
            shape=("engram_layers", "history", "engram_heads"),
            meaning="moduli, one per layer, n-gram size and head",
        ),
        Operand(
            name="offsets",
            dtype="int64",
            shape=("engram_layers", "columns"),
            meaning="first row of each column's range in its table",
        ),
    ),
    outputs=(
        Operand(
            name="hash_ids",
            dtype="int64",
            shape=("batch", "tokens", "engram_layers", "columns"),
            meaning="table rows; columns are n-gram size outer, head inner",
        ),
    ),
    attributes=(Attribute(name="pad_id", kind="int", meaning="compressed id that stands for a blocked position"),),
    tolerance=Tolerance(rtol=0.0, atol=0.0),
)
