"""Triton kernels of `Indexer` (spec 5.5): scores, candidate blocks, and an exact top-k by radix selection.

A score is turned into a 32-bit key that orders as the score does; a key of zero means "never selected" (not
visible, NaN, or -inf). Histograms of the key's bytes, most significant first, lead to the k-th largest key; the
entries above it and the first ones equal to it are then written in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engram_trt.plugins.kernels.rounding import dot_operand, round_to_dtype

BINS = tl.constexpr(256)
NO_BLOCK = tl.constexpr(2147483647)


@triton.jit
def _visible(start_positions, batch, token, compress_ratio, num_entries):
    """Entries the token sees, at most num_entries: (p+1) // ratio."""
    position = tl.load(start_positions + batch) + token
    return tl.minimum((position + 1) // compress_ratio, num_entries).to(tl.int32)


@triton.jit
def _selection_key(scores):
    """uint32 that orders as float32 scores do; zero for NaN and -inf."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 and +0 tie
    key = tl.where(bits < 0, bits ^ -1, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(scores > float("-inf"), key, 0)


@triton.jit(do_not_specialize=["row_start", "num_blocks", "candidates"])
def sort_candidates_kernel(
    candidate_blocks,
    sorted_blocks,
    row_start,
    num_blocks,
    candidates,
    BLOCK_CANDIDATES: tl.constexpr,
):
    """Blocks of one row ascending, each once; what is no block, or stands there twice, becomes NO_BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_CANDIDATES)
    inside = lane < candidates
    block = tl.load(candidate_blocks + (row_start + row) * candidates + lane, mask=inside, other=-1)
    block = tl.sort(tl.where((block >= 0) & (block < num_blocks), block, NO_BLOCK))
    place = sorted_blocks + row * candidates + lane
    tl.store(place, block, mask=inside)
    tl.debug_barrier()
    before = tl.load(place - 1, mask=inside & (lane > 0), other=-1)
    tl.debug_barrier()
    tl.store(place, tl.where(block == before, NO_BLOCK, block), mask=inside)


@triton.jit
def _score_tile(
    keys,
    q,
    weights,
    heads,
    width,
    T: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """sum_h w_h * relu(q_h . k_j) for a tile of keys [BLOCK_KEYS, BLOCK_WIDTH], rounded to T at each step."""
    feature = tl.arange(0, BLOCK_WIDTH)
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)
        mask = (head < heads)[:, None] & (feature < width)[None, :]
        query = tl.load(q + head[:, None] * width + feature[None, :], mask=mask, other=0.0)
        weight = tl.load(weights + head, mask=head < heads, other=0.0).to(tl.float32)
        dots = tl.dot(dot_operand(keys, INTERPRET), tl.trans(dot_operand(query, INTERPRET)), input_precision="ieee")
        dots = round_to_dtype(dots, T, INTERPRET)
        dots = tl.where(dots <= 0.0, 0.0, dots)  # relu that lets NaN through
        total += tl.sum(round_to_dtype(dots * weight[None, :], T, INTERPRET), axis=1)
    return round_to_dtype(total, T, INTERPRET)


@triton.jit(
    do_not_specialize=[
        "batch_start",
        "token_start",
        "chunk_tokens",
        "tokens",
        "entries",
        "num_entries",
        "score_units",
        "heads",
        "width_units",
        "compress_ratio",
        "tokens_per_program",
    ]
)
def index_scores_kernel(
    index_q,
    index_weights,
    index_keys,
    start_positions,
    scores,
    batch_start,
    token_start,
    chunk_tokens,
    tokens,
    entries,
    num_entries,
    score_units,
    heads,
    width_units,
    compress_ratio,
    tokens_per_program,
    UNIT: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """scores[row, j] for BLOCK_KEYS entries j and some tokens of one batch row; the keys are read once."""
    T: tl.constexpr = index_q.dtype.element_ty
    groups = tl.cdiv(chunk_tokens, tokens_per_program)
    local_batch = tl.program_id(1) // groups
    batch = (batch_start + local_batch).to(tl.int64)
    first = (tl.program_id(1) % groups) * tokens_per_program
    last = tl.minimum(first + tokens_per_program, chunk_tokens)
    width = width_units * UNIT  # a multiple of UNIT, so that loads can be 16 bytes wide
    entry = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    feature = tl.arange(0, BLOCK_WIDTH)
    places = (batch * entries + entry)[:, None] * width + feature[None, :]
    key_mask = (entry < num_entries)[:, None] & (feature < width)[None, :]
    keys = tl.load(index_keys + places, mask=key_mask, other=0.0)
    for local_token in range(first, last):
        token = token_start + local_token
        visible = _visible(start_positions, batch, token, compress_ratio, num_entries)
        row = batch * tokens + token
        score = tl.full([BLOCK_KEYS], float("-inf"), tl.float32)
        if tl.program_id(0) * BLOCK_KEYS < visible:
            score = _score_tile(
                keys,
                index_q + row * heads * width,
                index_weights + row * heads,
                heads,
                width,
                T,
                BLOCK_KEYS,
                BLOCK_HEADS,
                BLOCK_WIDTH,
                INTERPRET,
            )
            score = tl.where((entry < visible) & (score == score), score, float("-inf"))
        place = (local_batch * chunk_tokens + local_token).to(tl.int64) * (score_units * UNIT) + entry
        tl.store(scores + place, score, mask=entry < score_units * UNIT)


@triton.jit(
    do_not_specialize=[
        "batch_start",
        "token_start",
        "chunk_tokens",
        "tokens",
        "entries",
        "num_entries",
        "score_units",
        "heads",
        "width_units",
        "compress_ratio",
        "candidates",
        "block_size",
    ]
)
def candidate_scores_kernel(
    index_q,
    index_weights,
    index_keys,
    start_positions,
    sorted_blocks,
    scores,
    batch_start,
    token_start,
    chunk_tokens,
    tokens,
    entries,
    num_entries,
    score_units,
    heads,
    width_units,
    compress_ratio,
    candidates,
    block_size,
    UNIT: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """scores[row, slot] of the entries in one token's candidate blocks; only those keys are read."""
    T: tl.constexpr = index_q.dtype.element_ty
    local_row = tl.program_id(1)
    batch = (batch_start + local_row // chunk_tokens).to(tl.int64)
    token = token_start + local_row % chunk_tokens
    visible = _visible(start_positions, batch, token, compress_ratio, num_entries)
    width = width_units * UNIT
    slot = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    listed = slot // block_size < candidates
    block = tl.load(
        sorted_blocks + local_row.to(tl.int64) * candidates + slot // block_size, mask=listed, other=NO_BLOCK
    )
    entry = tl.where(block == NO_BLOCK, visible, block * block_size + slot % block_size)
    seen = listed & (entry < visible)
    score = tl.full([BLOCK_KEYS], float("-inf"), tl.float32)
    if tl.max(seen.to(tl.int32), axis=0) == 1:
        feature = tl.arange(0, BLOCK_WIDTH)
        places = (batch * entries + tl.where(seen, entry, 0))[:, None] * width + feature[None, :]
        keys = tl.load(index_keys + places, mask=seen[:, None] & (feature < width)[None, :], other=0.0)
        row = batch * tokens + token
        score = _score_tile(
            keys,
            index_q + row * heads * width,
            index_weights + row * heads,
            heads,
            width,
            T,
            BLOCK_KEYS,
            BLOCK_HEADS,
            BLOCK_WIDTH,
            INTERPRET,
        )
        score = tl.where(seen & (score == score), score, float("-inf"))
    num_scores = score_units * UNIT  # padded with -inf
    tl.store(scores + local_row.to(tl.int64) * num_scores + slot, score, mask=slot < num_scores)


@triton.jit(
    do_not_specialize=[
        "batch_start",
        "token_start",
        "chunk_tokens",
        "num_entries",
        "score_units",
        "block_units",
        "compress_ratio",
        "block_size",
    ]
)
def block_scores_kernel(
    scores,
    start_positions,
    block_scores,
    batch_start,
    token_start,
    chunk_tokens,
    num_entries,
    score_units,
    block_units,
    compress_ratio,
    block_size,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest score of each block of entries; +inf where the newest visible entry lies (spec 5.5.1)."""
    local_row = tl.program_id(1)
    batch = batch_start + local_row // chunk_tokens
    token = token_start + local_row % chunk_tokens
    visible = _visible(start_positions, batch, token, compress_ratio, num_entries)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    row = scores + local_row.to(tl.int64) * (score_units * UNIT)
    num_blocks = block_units * UNIT  # padded with -inf
    for inner in range(block_size):
        entry = block * block_size + inner
        score = tl.load(row + entry, mask=entry < num_entries, other=float("-inf"))
        best = tl.maximum(best, score)
    newest = tl.where(visible > 0, (visible - 1) // block_size, -1)
    best = tl.where(block == newest, float("inf"), best)
    tl.store(block_scores + local_row.to(tl.int64) * num_blocks + block, best, mask=block < num_blocks)


@triton.jit
def _descend(histograms, row, rows, k, PASSES: tl.constexpr):
    """First PASSES bytes of the k-th largest key of a row, and how many keys that begin so are still needed."""
    prefix = k * 0
    needed = k + 0
    lane = tl.arange(0, BINS)
    for step in tl.static_range(PASSES):
        counts = tl.load(histograms + (step * rows + row).to(tl.int64) * BINS + (255 - lane))
        total = tl.cumsum(counts, axis=0)  # from the largest byte down
        above = total < needed
        byte = tl.maximum(255 - tl.sum(above.to(tl.int32), axis=0), 0)
        needed -= tl.sum(tl.where(above, counts, 0), axis=0)
        prefix = (prefix << 8) | byte
    return prefix, needed


@triton.jit(do_not_specialize=["score_units", "rows", "k"])
def key_histogram_kernel(
    scores,
    histograms,
    score_units,
    rows,
    k,
    UNIT: tl.constexpr,
    PASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """histograms[PASS, row] += counts of the keys' next byte, over the keys that share the bytes found so far."""
    row = tl.program_id(1)
    num_scores = score_units * UNIT  # padded, so that loads can be 16 bytes wide
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_scores
    place = row.to(tl.int64) * num_scores + index
    key = _selection_key(tl.load(scores + place, mask=inside, other=float("-inf")))
    if PASS > 0:
        prefix, _ = _descend(histograms, row, rows, k, PASS)
        inside = inside & ((key >> (32 - 8 * PASS)).to(tl.int32) == prefix)
    byte = ((key >> (24 - 8 * PASS)) & 255).to(tl.int32)
    counts = tl.histogram(byte, BINS, mask=inside)
    target = histograms + (PASS * rows + row).to(tl.int64) * BINS + tl.arange(0, BINS)
    tl.atomic_add(target, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _above_and_equal(key, prefix, PASSES: tl.constexpr):
    """Masks of the keys above the threshold and at it; with PASSES 0 every selectable key is above."""
    if PASSES == 0:
        above = key > 0
        equal = key < 0
    elif PASSES == 4:
        # The threshold is a whole 32-bit key; compare it unsigned.
        threshold = prefix.to(tl.uint32, bitcast=True)
        above = key > threshold
        equal = (key == threshold) & (key > 0)
    else:
        leading = (key >> (32 - 8 * PASSES)).to(tl.int32)
        above = leading > prefix
        equal = (leading == prefix) & (key > 0)
    return above, equal


@triton.jit(do_not_specialize=["score_units", "rows", "k"])
def count_selected_kernel(
    scores,
    histograms,
    counts,
    score_units,
    rows,
    k,
    UNIT: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[row, block] = keys above the threshold, and at it, in one block of a row."""
    row = tl.program_id(1)
    num_scores = score_units * UNIT  # padded, so that loads can be 16 bytes wide
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * num_scores + index
    key = _selection_key(tl.load(scores + place, mask=index < num_scores, other=float("-inf")))
    prefix, _ = _descend(histograms, row, rows, k, PASSES)
    above, equal = _above_and_equal(key, prefix, PASSES)
    target = counts + (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(target, tl.sum(above.to(tl.int32), axis=0))
    tl.store(target + 1, tl.sum(equal.to(tl.int32), axis=0))


@triton.jit
def _counts_before(counts, row, blocks, block, BLOCK_COUNTS: tl.constexpr):
    """Keys above and at the threshold in the blocks of a row before one."""
    lane = tl.arange(0, BLOCK_COUNTS)
    above = block * 0
    equal = block * 0
    base = counts + row.to(tl.int64) * blocks * 2
    for start in range(0, block, BLOCK_COUNTS):
        mask = start + lane < block
        above += tl.sum(tl.load(base + (start + lane) * 2, mask=mask, other=0), axis=0)
        equal += tl.sum(tl.load(base + (start + lane) * 2 + 1, mask=mask, other=0), axis=0)
    return above, equal


@triton.jit(
    do_not_specialize=[
        "batch_start",
        "token_start",
        "chunk_tokens",
        "tokens",
        "score_units",
        "rows",
        "k",
        "candidates",
        "block_size",
        "out_width",
    ]
)
def write_selected_kernel(
    scores,
    histograms,
    counts,
    sorted_blocks,
    selected,
    batch_start,
    token_start,
    chunk_tokens,
    tokens,
    score_units,
    rows,
    k,
    candidates,
    block_size,
    out_width,
    UNIT: tl.constexpr,
    PASSES: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
):
    """selected[row] = the entries chosen, ascending, then -1. MAPPED: a score's slot names an entry of a block."""
    row = tl.program_id(1)
    num_scores = score_units * UNIT  # padded, so that loads can be 16 bytes wide
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * num_scores + index
    key = _selection_key(tl.load(scores + place, mask=index < num_scores, other=float("-inf")))
    prefix, needed = _descend(histograms, row, rows, k, PASSES)
    above, equal = _above_and_equal(key, prefix, PASSES)
    above_before, equal_before = _counts_before(counts, row, tl.num_programs(0), block, BLOCK_COUNTS)
    above_rank = above_before + tl.cumsum(above.to(tl.int32), axis=0)  # this entry included
    equal_rank = equal_before + tl.cumsum(equal.to(tl.int32), axis=0)
    taken = above | (equal & (equal_rank <= needed))
    position = above_rank + tl.minimum(equal_rank, needed) - 1
    if MAPPED:
        entry = tl.load(
            sorted_blocks + row.to(tl.int64) * candidates + index // block_size,
            mask=index // block_size < candidates,
            other=0,
        )
        entry = entry * block_size + index % block_size
    else:
        entry = index
    batch = (batch_start + row // chunk_tokens).to(tl.int64)
    target = selected + (batch * tokens + token_start + row % chunk_tokens) * out_width
    tl.store(target + position, entry, mask=taken & (position < out_width))
    if block == tl.num_programs(0) - 1:
        above_total = above_before + tl.sum(above.to(tl.int32), axis=0)
        equal_total = equal_before + tl.sum(equal.to(tl.int32), axis=0)
        written = above_total + tl.minimum(equal_total, needed)
        for start in range(0, out_width, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            tl.store(target + lane, tl.full([BLOCK], -1, tl.int32), mask=(lane >= written) & (lane < out_width))
