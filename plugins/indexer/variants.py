"""Kernel variants of `Indexer`."""

from __future__ import annotations

from engram_trt.plugins.indexer.spec import SPEC
from engram_trt.plugins.kernels.plan import INTERPRET, TRITON_NAME, ConstantValue, Variant

MODULE = "engram_trt.plugins.indexer.kernel"

BLOCK_KEYS = {"float32": 32, "bfloat16": 128}
WARPS = {"float32": 8, "bfloat16": 4}
BLOCK_HEADS = 32
MAX_WIDTH = 128
WIDTH_UNIT = 16
BLOCK_BLOCKS = 512
BLOCK_SCORES = 2048
"""Scores one program of the selection looks at."""

SCORE_UNIT = 16
"""Rows of scores are padded to whole units with -inf, so that loads can be 16 bytes wide."""

BLOCK_COUNTS = 256
BLOCK_CANDIDATES = (64, 2048)
"""Lengths of candidate lists the sort covers."""

PASSES_OF = {"float32": 4, "bfloat16": 2}
"""Bytes of a selection key that can differ: a bfloat16 score has sixteen bits."""


def _scores_constants(dtype: str) -> tuple[tuple[str, ConstantValue], ...]:
    return (
        ("UNIT", WIDTH_UNIT),
        ("BLOCK_KEYS", BLOCK_KEYS[dtype]),
        ("BLOCK_HEADS", BLOCK_HEADS),
        ("BLOCK_WIDTH", MAX_WIDTH),
        (INTERPRET, False),
    )


def _operands(dtype: str) -> tuple[tuple[str, str], ...]:
    kind = f"*{TRITON_NAME[dtype]}"
    return (
        ("index_q", kind),
        ("index_weights", kind),
        ("index_keys", kind),
        ("start_positions", "*i64"),
    )


PLACE = (("batch_start", "i32"), ("token_start", "i32"), ("chunk_tokens", "i32"))


def scores_variant(dtype: str) -> Variant:
    """Scores of all visible entries."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="index_scores_kernel",
        signature=(
            *_operands(dtype),
            ("scores", "*fp32"),
            *PLACE,
            ("tokens", "i32"),
            ("entries", "i32"),
            ("num_entries", "i32"),
            ("score_units", "i32"),
            ("heads", "i32"),
            ("width_units", "i32"),
            ("compress_ratio", "i32"),
            ("tokens_per_program", "i32"),
        ),
        constants=_scores_constants(dtype),
        num_warps=WARPS[dtype],
        num_stages=2,
        unaligned=("index_weights", "start_positions"),
    )


def candidate_scores_variant(dtype: str) -> Variant:
    """Scores of the entries in candidate blocks."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="candidate_scores_kernel",
        signature=(
            *_operands(dtype),
            ("sorted_blocks", "*i32"),
            ("scores", "*fp32"),
            *PLACE,
            ("tokens", "i32"),
            ("entries", "i32"),
            ("num_entries", "i32"),
            ("score_units", "i32"),
            ("heads", "i32"),
            ("width_units", "i32"),
            ("compress_ratio", "i32"),
            ("candidates", "i32"),
            ("block_size", "i32"),
        ),
        constants=_scores_constants(dtype),
        num_warps=WARPS[dtype],
        num_stages=2,
        unaligned=("index_weights", "start_positions"),
    )


def sort_variant(candidates: int) -> Variant:
    """The sort of a candidate list."""
    block = next(length for length in BLOCK_CANDIDATES if candidates <= length)
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="sort_candidates_kernel",
        signature=(
            ("candidate_blocks", "*i32"),
            ("sorted_blocks", "*i32"),
            ("row_start", "i32"),
            ("num_blocks", "i32"),
            ("candidates", "i32"),
        ),
        constants=(("BLOCK_CANDIDATES", block),),
        unaligned=("candidate_blocks",),
    )


def block_scores_variant() -> Variant:
    """Scores of blocks."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="block_scores_kernel",
        signature=(
            ("scores", "*fp32"),
            ("start_positions", "*i64"),
            ("block_scores", "*fp32"),
            *PLACE,
            ("num_entries", "i32"),
            ("score_units", "i32"),
            ("block_units", "i32"),
            ("compress_ratio", "i32"),
            ("block_size", "i32"),
        ),
        constants=(("UNIT", SCORE_UNIT), ("BLOCK", BLOCK_BLOCKS)),
        unaligned=("start_positions",),
    )


def histogram_variant(number: int) -> Variant:
    """The histogram of one byte of the keys."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="key_histogram_kernel",
        signature=(
            ("scores", "*fp32"),
            ("histograms", "*i32"),
            ("score_units", "i32"),
            ("rows", "i32"),
            ("k", "i32"),
        ),
        constants=(("UNIT", SCORE_UNIT), ("PASS", number), ("BLOCK", BLOCK_SCORES)),
        num_warps=8,
    )


def count_variant(passes: int) -> Variant:
    """The counts of keys above and at the threshold."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="count_selected_kernel",
        signature=(
            ("scores", "*fp32"),
            ("histograms", "*i32"),
            ("counts", "*i32"),
            ("score_units", "i32"),
            ("rows", "i32"),
            ("k", "i32"),
        ),
        constants=(("UNIT", SCORE_UNIT), ("PASSES", passes), ("BLOCK", BLOCK_SCORES)),
        num_warps=8,
    )


def write_variant(passes: int, *, mapped: bool) -> Variant:
    """The write of the selected entries."""
    return Variant(
        op=SPEC.name,
        module=MODULE,
        function="write_selected_kernel",
        signature=(
            ("scores", "*fp32"),
            ("histograms", "*i32"),
            ("counts", "*i32"),
            ("sorted_blocks", "*i32"),
            ("selected", "*i32"),
            *PLACE,
            ("tokens", "i32"),
            ("score_units", "i32"),
            ("rows", "i32"),
            ("k", "i32"),
            ("candidates", "i32"),
            ("block_size", "i32"),
            ("out_width", "i32"),
        ),
        constants=(
            ("UNIT", SCORE_UNIT),
            ("PASSES", passes),
            ("MAPPED", mapped),
            ("BLOCK", BLOCK_SCORES),
            ("BLOCK_COUNTS", BLOCK_COUNTS),
        ),
        num_warps=8,
        unaligned=("selected",),
    )


def variants(sm: int) -> tuple[Variant, ...]:
    """Every variant a plan can hold."""
    found = [block_scores_variant()]
    for dtype in PASSES_OF:
        found.append(scores_variant(dtype))
        found.append(candidate_scores_variant(dtype))
    found.extend(sort_variant(length) for length in BLOCK_CANDIDATES)
    found.extend(histogram_variant(number) for number in range(max(PASSES_OF.values())))
    for passes in (0, *PASSES_OF.values()):
        found.append(count_variant(passes))
        found.extend(write_variant(passes, mapped=mapped) for mapped in (False, True))
    return tuple(found)
