"""Launch plan of `Indexer`: tokens are taken in chunks whose scores fit a bounded workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, PLAIN, SPEC
from engram_trt.plugins.indexer.variants import (
    BLOCK_BLOCKS,
    BLOCK_CANDIDATES,
    BLOCK_KEYS,
    BLOCK_SCORES,
    MAX_WIDTH,
    PASSES_OF,
    SCORE_UNIT,
    WIDTH_UNIT,
    block_scores_variant,
    candidate_scores_variant,
    count_variant,
    histogram_variant,
    scores_variant,
    sort_variant,
    variants,
    write_variant,
)
from engram_trt.plugins.kernels.checks import Inputs, info, require
from engram_trt.plugins.kernels.plan import (
    MULTIPROCESSORS,
    Clear,
    Launch,
    LaunchPlan,
    TensorInfo,
    ceil_div,
    lay_out_workspace,
    make_launch,
)
from engram_trt.plugins.kernels.planner import Attributes, Planner

WORKSPACE_BYTES = 256 * 2**20
"""Largest workspace of a call, unless one token alone needs more."""

MAX_ROWS = 65535
HISTOGRAM_BINS = 256
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_TOKENS_PER_PROGRAM = 64


def units(num_scores: int) -> int:
    """Units of `SCORE_UNIT` that a row of scores takes."""
    return ceil_div(num_scores, SCORE_UNIT)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of one call."""

    batch: int
    tokens: int
    heads: int
    width: int
    entries: int
    num_entries: int
    role: int
    index_topk: int
    candidates: int
    block_size: int
    ratio: int
    dtype: str

    @property
    def num_blocks(self) -> int:
        """Blocks that the visible entries make."""
        return ceil_div(self.num_entries, self.block_size)

    @property
    def num_scores(self) -> int:
        """Scores of a token: all visible entries, or those of its candidate blocks."""
        if self.role != CANDIDATE_USER:
            return self.num_entries
        return min(self.candidates, self.num_blocks) * self.block_size

    def buffers(self, rows: int) -> dict[str, TensorInfo]:
        """Workspace of a chunk of `rows` tokens."""

        def selection(prefix: str, num_scores: int) -> dict[str, TensorInfo]:
            blocks = max(1, ceil_div(num_scores, BLOCK_SCORES))
            histograms = TensorInfo(shape=(PASSES_OF[self.dtype], rows, HISTOGRAM_BINS), dtype="int32")
            return {
                f"{prefix}scores": TensorInfo(shape=(rows, units(num_scores) * SCORE_UNIT), dtype="float32"),
                f"{prefix}histograms": histograms,
                f"{prefix}counts": TensorInfo(shape=(rows, blocks, 2), dtype="int32"),
            }

        found = selection("", self.num_scores)
        if self.role == CANDIDATE_SOURCE:
            found |= selection("block_", self.num_blocks)
        if self.role == CANDIDATE_USER:
            found["sorted_blocks"] = TensorInfo(shape=(rows, self.candidates), dtype="int32")
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens handled together: some tokens of one batch row, or all tokens of some."""

    batch_start: int
    num_batches: int
    token_start: int
    num_tokens: int

    @property
    def rows(self) -> int:
        return self.num_batches * self.num_tokens


def chunks(batch: int, tokens: int, max_rows: int) -> Iterator[Chunk]:
    """Cut [batch, tokens] into chunks of at most `max_rows` tokens."""
    if tokens <= max_rows:
        step = max_rows // tokens
        for start in range(0, batch, step):
            yield Chunk(start, min(step, batch - start), 0, tokens)
        return
    for row in range(batch):
        for start in range(0, tokens, max_rows):
            yield Chunk(row, 1, start, min(max_rows, tokens - start))


def outputs(inputs: Inputs, attributes: Attributes) -> dict[str, TensorInfo]:
    """[batch, tokens, index_topk] int32 and, for a candidate source, the chosen blocks."""
    batch, tokens = info(SPEC.name, inputs, "index_q").shape[:2]
    shape = (batch, tokens, int(attributes["index_topk"]))
    found = {"topk_indices": TensorInfo(shape=shape, dtype="int32")}
    if int(attributes["role"]) == CANDIDATE_SOURCE:
        blocks = (batch, tokens, int(attributes["candidate_topk_blocks"]))
        found["candidate_blocks_out"] = TensorInfo(shape=blocks, dtype="int32")
    return found


def _positive(attributes: Attributes, names: tuple[str, ...]) -> None:
    for name in names:
        require(
            int(attributes[name]) >= 1,
            SPEC.name,
            name,
            found=str(attributes[name]),
            expected="at least 1",
            remedy="Pass the model's value.",
        )


def _sizes(inputs: Inputs, attributes: Attributes) -> Sizes:
    q, keys = info(SPEC.name, inputs, "index_q"), info(SPEC.name, inputs, "index_keys")
    num_entries = info(SPEC.name, inputs, "visible_entries").shape[0]
    candidates, role = inputs.get("candidate_blocks"), int(attributes["role"])
    require(
        role in (PLAIN, CANDIDATE_SOURCE, CANDIDATE_USER),
        SPEC.name,
        "role",
        found=str(role),
        expected="0, 1 or 2",
        remedy="Pass a role of the contract.",
    )
    require(
        (candidates is not None) == (role == CANDIDATE_USER),
        SPEC.name,
        "candidate_blocks",
        found="absent" if candidates is None else "present",
        expected="present for a candidate user (role 2) and only then",
        remedy="Pass what the candidate source chose.",
    )
    _positive(attributes, ("compress_ratio", "index_topk"))
    if role != PLAIN:
        _positive(attributes, ("candidate_topk_blocks", "candidate_block_size"))
    width = q.shape[3]
    require(
        width % WIDTH_UNIT == 0 and width <= MAX_WIDTH,
        SPEC.name,
        "index_q shape",
        found=f"index_head_dim {width}",
        expected=f"a multiple of {WIDTH_UNIT} up to {MAX_WIDTH}",
        remedy="No kernel covers other widths.",
    )
    require(
        num_entries <= keys.shape[1],
        SPEC.name,
        "visible_entries shape",
        found=str(num_entries),
        expected=f"at most the {keys.shape[1]} entries of index_keys",
        remedy="Bound the visible entries by the cache's capacity.",
    )
    listed = candidates.shape[2] if candidates is not None else int(attributes["candidate_topk_blocks"])
    require(
        role != CANDIDATE_USER or listed <= BLOCK_CANDIDATES[-1],
        SPEC.name,
        "candidate_blocks shape",
        found=f"{listed} blocks",
        expected=f"at most {BLOCK_CANDIDATES[-1]}",
        remedy="No kernel covers longer lists.",
    )
    batch, tokens, heads, _ = q.shape
    return Sizes(
        batch=batch,
        tokens=tokens,
        heads=heads,
        width=width,
        entries=keys.shape[1],
        num_entries=num_entries,
        role=role,
        index_topk=int(attributes["index_topk"]),
        candidates=listed,
        block_size=max(1, int(attributes["candidate_block_size"])),
        ratio=int(attributes["compress_ratio"]),
        dtype=q.dtype,
    )


def plan_steps(inputs: Inputs, attributes: Attributes, sm: int) -> LaunchPlan:
    """Scores of a chunk of tokens, then its selection, chunk by chunk in one workspace."""
    sizes = _sizes(inputs, attributes)
    if sizes.batch * sizes.tokens * sizes.heads == 0:
        return LaunchPlan(op=SPEC.name)
    row_bytes = sum(buffer.num_bytes for buffer in sizes.buffers(1).values())
    max_rows = min(max(1, WORKSPACE_BYTES // row_bytes), MAX_ROWS)
    steps: list[Launch | Clear] = []
    largest = 0
    for chunk in chunks(sizes.batch, sizes.tokens, max_rows):
        largest = max(largest, chunk.rows)
        steps.extend(_chunk_steps(sizes, chunk, sm))
    workspace, workspace_bytes = lay_out_workspace(sizes.buffers(largest))
    return LaunchPlan(op=SPEC.name, steps=tuple(steps), workspace=workspace, workspace_bytes=workspace_bytes)


def _chunk_steps(sizes: Sizes, chunk: Chunk, sm: int) -> Iterator[Launch | Clear]:
    if sizes.num_entries > 0:
        if sizes.role == CANDIDATE_USER:
            yield from _candidate_scores(sizes, chunk)
        else:
            yield _scores(sizes, chunk, sm)
    mapped = sizes.role == CANDIDATE_USER
    yield from _selection(sizes, chunk, "", sizes.num_scores, sizes.index_topk, "topk_indices", mapped=mapped)
    if sizes.role == CANDIDATE_SOURCE:
        if sizes.num_blocks > 0:
            yield _block_scores(sizes, chunk)
        yield from _selection(
            sizes,
            chunk,
            "block_",
            sizes.num_blocks,
            sizes.candidates,
            "candidate_blocks_out",
            mapped=False,
        )


def _place(chunk: Chunk) -> dict[str, str | int | float]:
    return {
        "batch_start": chunk.batch_start,
        "token_start": chunk.token_start,
        "chunk_tokens": chunk.num_tokens,
    }


def _score_arguments(sizes: Sizes) -> dict[str, str | int | float]:
    names = ("index_q", "index_weights", "index_keys", "start_positions", "scores")
    return {
        **{name: name for name in names},
        "tokens": sizes.tokens,
        "entries": sizes.entries,
        "num_entries": sizes.num_entries,
        "score_units": units(sizes.num_scores),
        "heads": sizes.heads,
        "width_units": sizes.width // WIDTH_UNIT,
        "compress_ratio": sizes.ratio,
    }


def _scores(sizes: Sizes, chunk: Chunk, sm: int) -> Launch:
    key_tiles = ceil_div(units(sizes.num_entries) * SCORE_UNIT, BLOCK_KEYS[sizes.dtype])
    # Reuse a tile of keys for as many tokens as still leaves work for the whole GPU.
    wanted = PROGRAMS_PER_MULTIPROCESSOR * MULTIPROCESSORS[sm]
    per_program = max(1, min(MAX_TOKENS_PER_PROGRAM, key_tiles * chunk.rows // wanted))
    groups = ceil_div(chunk.num_tokens, per_program)
    return make_launch(
        scores_variant(sizes.dtype),
        (key_tiles, chunk.num_batches * groups, 1),
        {**_score_arguments(sizes), **_place(chunk), "tokens_per_program": per_program},
    )


def _candidate_scores(sizes: Sizes, chunk: Chunk) -> Iterator[Launch]:
    yield make_launch(
        sort_variant(sizes.candidates),
        (chunk.rows, 1, 1),
        {
            "candidate_blocks": "candidate_blocks",
            "sorted_blocks": "sorted_blocks",
            "row_start": chunk.batch_start * sizes.tokens + chunk.token_start,
            "num_blocks": sizes.num_blocks,
            "candidates": sizes.candidates,
        },
    )
    yield make_launch(
        candidate_scores_variant(sizes.dtype),
        (ceil_div(units(sizes.num_scores) * SCORE_UNIT, BLOCK_KEYS[sizes.dtype]), chunk.rows, 1),
        {
            **_score_arguments(sizes),
            **_place(chunk),
            "sorted_blocks": "sorted_blocks",
            "candidates": sizes.candidates,
            "block_size": sizes.block_size,
        },
    )


def _block_scores(sizes: Sizes, chunk: Chunk) -> Launch:
    return make_launch(
        block_scores_variant(),
        (ceil_div(units(sizes.num_blocks) * SCORE_UNIT, BLOCK_BLOCKS), chunk.rows, 1),
        {
            "scores": "scores",
            "start_positions": "start_positions",
            "block_scores": "block_scores",
            **_place(chunk),
            "num_entries": sizes.num_entries,
            "score_units": units(sizes.num_scores),
            "block_units": units(sizes.num_blocks),
            "compress_ratio": sizes.ratio,
            "block_size": sizes.block_size,
        },
    )


def _selection(
    sizes: Sizes, chunk: Chunk, prefix: str, num_scores: int, k: int, output: str, *, mapped: bool
) -> Iterator[Launch | Clear]:
    """Histograms from the keys' first byte on, counts, and the write; all keys are taken where they fit into k."""
    passes = PASSES_OF[sizes.dtype] if num_scores > k else 0
    grid = (max(1, ceil_div(num_scores, BLOCK_SCORES)), chunk.rows, 1)
    common: dict[str, str | int | float] = {
        "scores": f"{prefix}scores",
        "histograms": f"{prefix}histograms",
        "score_units": units(num_scores),
        "rows": chunk.rows,
        "k": k,
    }
    if passes:
        yield Clear(f"{prefix}histograms")
    for number in range(passes):
        yield make_launch(histogram_variant(number), grid, common)
    counted = {**common, "counts": f"{prefix}counts"}
    yield make_launch(count_variant(passes), grid, counted)
    yield make_launch(
        write_variant(passes, mapped=mapped),
        grid,
        {
            **counted,
            **_place(chunk),
            "sorted_blocks": "sorted_blocks" if mapped else f"{prefix}counts",
            "selected": output,
            "tokens": sizes.tokens,
            "candidates": sizes.candidates,
            "block_size": sizes.block_size,
            "out_width": k,
        },
    )


PLANNER = Planner(spec=SPEC, outputs=outputs, plan_steps=plan_steps, variants=variants)
