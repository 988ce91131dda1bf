"""Kernels under the interpreter against the references: odd sizes, several tiles in every dimension, edges.

Every buffer a kernel should write is filled with NaN or the largest integer beforehand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expert_graphs import expert_attributes, expert_tensors
from torch import Tensor

from engram_trt.plugins.cache_write import reference as cache_write
from engram_trt.plugins.engram_gather import reference as engram_gather
from engram_trt.plugins.engram_hash import reference as engram_hash
from engram_trt.plugins.hyper_connection_mix import reference as hyper_connection_mix
from engram_trt.plugins.indexer import reference as indexer
from engram_trt.plugins.moe_experts import reference as moe_experts
from engram_trt.plugins.quantize_dequantize import reference as quantize_dequantize
from engram_trt.plugins.sparse_attention import reference as sparse_attention

FLOAT_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
DTYPES = (torch.float32, torch.bfloat16)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 12), (torch.bfloat16, 536), (torch.bfloat16, 5), (torch.int64, 3)],
)
def test_cache_write(interpreter: Any, dtype: torch.dtype, width: int, mode: int) -> None:
    cache = (torch.randn(2, 9, width, generator=random(1)) * 100).to(dtype)
    update = (torch.randn(2, 5, width, generator=random(2)) * 100).to(dtype)
    positions = torch.tensor([3, 0] if mode == 0 else [107, 8])
    tensors = {"cache": cache, "update": update, "write_positions": positions}
    result = interpreter.run("CacheWrite", tensors, {"mode": mode})["cache_out"]
    assert torch.equal(result, cache_write.cache_write(cache, update, positions, mode))


def test_cache_write_drops_rows_outside_an_appended_cache(interpreter: Any) -> None:
    cache, update = torch.zeros(2, 4, 8), torch.ones(2, 3, 8)
    tensors = {"cache": cache, "update": update, "write_positions": torch.tensor([2, -1])}
    result = interpreter.run("CacheWrite", tensors, {"mode": 0})["cache_out"]
    assert result.sum(-1).tolist() == [[0, 0, 8, 8], [8, 8, 0, 0]]


@pytest.mark.parametrize("format", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_dequantize(interpreter: Any, dtype: torch.dtype, format: int) -> None:
    scale = torch.exp(8 * torch.randn(47, 1, generator=random(3)))
    x = (torch.randn(47, 224, generator=random(4)) * scale).to(dtype)
    x[0] = 0
    x[1, ::3] = -0.0
    result = interpreter.run("QuantizeDequantize", {"x": x}, {"format": format})["y"]
    assert torch.equal(result, quantize_dequantize.quantize_dequantize(x, format))


@pytest.mark.parametrize(("history", "heads", "tokens"), [(3, 8, 37), (1, 3, 1), (4, 17, 5)])
def test_engram_hash(interpreter: Any, history: int, heads: int, tokens: int) -> None:
    draw = random(history)
    ids = torch.randint(-1, 99092, (2, tokens), generator=draw)
    past = torch.randint(-1, 99092, (2, history), generator=draw)
    multipliers = torch.randint(1, 2**45, (2, history + 1), generator=draw) * 2 + 1
    primes = torch.randint(16_000_000, 16_001_000, (2, history, heads), generator=draw)
    offsets = torch.randint(0, 384_000_000, (2, history * heads), generator=draw)
    tensors = {
        "compressed_ids": ids,
        "token_history": past,
        "multipliers": multipliers,
        "primes": primes,
        "offsets": offsets,
    }
    result = interpreter.run("EngramHash", tensors, {"pad_id": 2})["hash_ids"]
    assert torch.equal(result, engram_hash.engram_hash(ids, past, multipliers, primes, offsets, 2))


@pytest.mark.parametrize(("out_dtype", "width"), [(1, 32), (16, 288)])
def test_engram_gather(interpreter: Any, out_dtype: int, width: int) -> None:
    draw = random(5)
    rows = torch.randint(-128, 128, (300, width), generator=draw).to(torch.int8)
    scales = torch.randint(-128, 128, (300, width // 32), generator=draw).to(torch.int8)
    ids = torch.randint(0, 300, (2, 7, 3), generator=draw)
    tensors = {"engram_ids": ids, "engram_rows": rows, "engram_scales": scales}
    result = interpreter.run("EngramGather", tensors, {"out_dtype": out_dtype})["embeddings"]
    expected = engram_gather.engram_gather(ids, rows, scales, out_dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_engram_gather_gives_zeros_outside_the_table(interpreter: Any) -> None:
    rows = torch.full((4, 32), 0x38, dtype=torch.int8)
    tensors = {
        "engram_ids": torch.tensor([[[0, 4, -1, 2**40, 3]]]),
        "engram_rows": rows,
        "engram_scales": torch.full((4, 1), 127, dtype=torch.int8),
    }
    result = interpreter.run("EngramGather", tensors, {"out_dtype": 1})["embeddings"]
    assert result.reshape(5, 32).sum(1).tolist() == [32, 0, 0, 0, 32]


def test_engram_gather_from_shards(interpreter: Any) -> None:
    draw = random(11)
    rows = torch.randint(-128, 127, (25, 64), generator=draw).to(torch.int8)
    scales = torch.randint(100, 127, (25, 2), generator=draw).to(torch.int8)
    ids = torch.tensor([0, 9, 10, 19, 20, 24, 25, -1])
    tensors = {"engram_ids": ids, "engram_rows": rows, "engram_scales": scales}
    result = interpreter.run("EngramGather from shards", tensors, {"shard_rows": 10})["embeddings"]
    expected = engram_gather.engram_gather(ids[:6].reshape(1, 1, -1), rows, scales, 1).reshape(6, 64)
    torch.testing.assert_close(result[:6], expected, rtol=0, atol=0, equal_nan=True)
    assert not bool(result[6:].any())


def test_engram_gather_addresses_need_64_bits(interpreter: Any) -> None:
    """Rows on either side of 2^31 bytes, and the last one of the larger released table."""
    table_rows = 384_016_682
    ids = torch.tensor([0, 8_388_607, 8_388_608, 268_435_456, table_rows - 1])
    draw = random(12)
    rows = torch.randint(-127, 126, (5, 256), generator=draw).to(torch.int8)
    scales = torch.randint(100, 127, (5, 8), generator=draw).to(torch.int8)
    tensors = {"engram_ids": ids, "engram_rows": rows, "engram_scales": scales}
    result = interpreter.run("EngramGather, sparse table", tensors, {"table_rows": table_rows})["embeddings"]
    expected = engram_gather.engram_gather(torch.arange(5).reshape(1, 1, -1), rows, scales, 1).reshape(5, 256)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.large
def test_engram_gather_from_one_table_beyond_2_31_bytes(interpreter: Any) -> None:
    rows = torch.zeros(8_388_609, 256, dtype=torch.int8)
    rows[8_388_607], rows[8_388_608] = 0x38, 0x40  # 1.0 and 2.0
    tensors = {
        "engram_ids": torch.tensor([[[8_388_607, 8_388_608, 0]]]),
        "engram_rows": rows,
        "engram_scales": torch.full((8_388_609, 8), 127, dtype=torch.int8),
    }
    result = interpreter.run("EngramGather", tensors, {"out_dtype": 1})["embeddings"].reshape(3, 256)
    assert result.unique(dim=1).flatten().tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "dim"), [(4, 320), (2, 16), (3, 32)])
def test_hyper_connection_mix(interpreter: Any, dtype: torch.dtype, streams: int, dim: int) -> None:
    draw = random(6)
    mixes = (2 + streams) * streams
    x = torch.randn(2, 11, streams, dim, generator=draw).to(dtype)
    x[0, 0] = 0  # the statistic's epsilon alone keeps this from 0/0
    fn = torch.randn(mixes, streams * dim, generator=draw) * 0.05
    scale, base = torch.randn(3, generator=draw), torch.randn(mixes, generator=draw)
    tensors = {"hidden_states": x, "hc_fn": fn, "hc_scale": scale, "hc_base": base}
    attributes = {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    result = interpreter.run("HyperConnectionMix", tensors, attributes)
    expected = hyper_connection_mix.hyper_connection_mix(x, fn, scale, base, 20, 1e-6, 1e-20)
    for name, value in zip(("pre", "post", "comb"), expected, strict=True):
        torch.testing.assert_close(result[name], value, **FLOAT_TOLERANCE)


ATTENTION = {
    "split keys, padded heads": (2, 3, 5, 48, 8, 12, 20, 37),
    "released width": (1, 1, 18, 512, 9, 9, 40, 19),
    "window only, two tiles of it": (1, 2, 3, 64, 40, 64, 0, 0),
    "one key": (1, 1, 1, 16, 1, 1, 1, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTION)
def test_sparse_attention(interpreter: Any, dtype: torch.dtype, case: str) -> None:
    batch, tokens, heads, dim, window, ring, entries, topk = ATTENTION[case]
    draw = random(7)
    q = torch.randn(batch, tokens, heads, dim, generator=draw).to(dtype)
    kv = torch.randn(batch, ring, dim, generator=draw).to(dtype)
    starts = torch.tensor([0, 30][:batch])
    kv[0, tokens:] = math.nan  # slots that no position of this row has reached
    sink = torch.randn(heads, generator=draw)
    compressed = selected = None
    if entries:
        compressed = torch.randn(batch, entries, dim, generator=draw).to(dtype)
        selected = torch.randint(-1, entries, (batch, tokens, topk), generator=draw).to(torch.int32)
        selected[..., topk // 2 :] = selected[..., :1]  # repeated entries count as often as they stand there
    tensors = {
        "q": q,
        "window_kv": kv,
        "start_positions": starts,
        "attn_sink": sink,
        "compressed_kv": compressed,
        "topk_indices": selected,
    }
    attributes = {"window_size": window, "softmax_scale": dim**-0.5}
    result = interpreter.run("SparseAttention", tensors, attributes)["attention_output"]
    expected = sparse_attention.sparse_attention(q, kv, starts, sink, compressed, selected, window, dim**-0.5)
    # bfloat16: each probability is rounded relative to the maximum so far, and half an ulp (2^-9) of every weight
    # may fall either way.
    tolerance = FLOAT_TOLERANCE if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 4e-3}
    torch.testing.assert_close(result, expected, **tolerance)


def test_sparse_attention_one_program_a_token(interpreter: Any) -> None:
    """Enough tokens to fill the GPU: whole key lists, no merge."""
    draw = random(8)
    q = torch.randn(1, 136, 2, 16, generator=draw)
    kv = torch.randn(1, 144, 16, generator=draw)
    sink, starts = torch.randn(2, generator=draw), torch.tensor([5])
    tensors = {"q": q, "window_kv": kv, "start_positions": starts, "attn_sink": sink}
    attributes = {"window_size": 6, "softmax_scale": 0.25}
    result = interpreter.run("SparseAttention", tensors, attributes)["attention_output"]
    expected = sparse_attention.sparse_attention(q, kv, starts, sink, None, None, 6, 0.25)
    torch.testing.assert_close(result, expected, **FLOAT_TOLERANCE)


def expert_reference(tensors: dict[str, Tensor | None], attributes: dict[str, float]) -> Tensor:
    names = ("ffn_in", "scores", "selection_bias", "experts_w1", "experts_w2", "experts_w3")
    scales = ("experts_w1_scale", "experts_w2_scale", "experts_w3_scale")
    arguments: Any = [tensors[name] for name in (*names, *scales)]
    return moe_experts.moe_experts(*arguments, **attributes)


@pytest.mark.parametrize(
    ("dtype", "packed", "format", "rows"),
    [
        (torch.float32, False, -1, 37),
        (torch.float32, True, 0, 7),
        (torch.float32, False, 2, 5),
        (torch.bfloat16, True, 0, 37),
        (torch.bfloat16, False, 1, 7),
        (torch.bfloat16, True, -1, 1),
    ],
)
def test_moe_experts(interpreter: Any, dtype: torch.dtype, packed: bool, format: int, rows: int) -> None:
    tensors, attributes = expert_tensors(dtype, packed, rows), expert_attributes(format)
    result = interpreter.run("MoEExperts", tensors, attributes)["routed_output"]
    expected = expert_reference(tensors, attributes)
    tolerance = FLOAT_TOLERANCE if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-3}
    torch.testing.assert_close(result, expected, **tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_moe_experts_bits_do_not_depend_on_batch_mates(interpreter: Any, packed: bool) -> None:
    tensors, attributes = expert_tensors(torch.bfloat16, packed, rows=19), expert_attributes(0)
    together = interpreter.run("MoEExperts", tensors, attributes)["routed_output"]
    for row in (0, 18):
        alone = dict(tensors)
        for name in ("ffn_in", "scores", "selection_bias"):
            value = tensors[name]
            assert value is not None
            alone[name] = value[row : row + 1]
        result = interpreter.run("MoEExperts", alone, attributes)["routed_output"]
        assert torch.equal(result[0], together[row])


INDEXING = {
    "several chunks of tokens": (2, 5, 4, 32, 40, 33, 6, 4, 3, 1),
    "several tiles, long heads": (1, 2, 40, 128, 300, 290, 7, 8, 5, 2),
    "fewer entries than k": (2, 1, 4, 32, 40, 4, 6, 2, 3, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("case", INDEXING)
def test_indexer(interpreter: Any, dtype: torch.dtype, role: int, case: str) -> None:
    batch, tokens, heads, width, entries, visible, topk, block_size, blocks, ratio = INDEXING[case]
    draw = random(10)
    # Small integers make every product exact, whatever the order of the sums, and many scores tie.
    q = torch.randint(-2, 3, (batch, tokens, heads, width), generator=draw).to(dtype)
    weights = torch.randint(-2, 4, (batch, tokens, heads), generator=draw).to(dtype)
    keys = torch.randint(-2, 3, (batch, entries, width), generator=draw).to(dtype)
    keys[0, 2] = math.nan  # a damaged key is never chosen
    keys[:, 5 : visible // 2] = keys[:, 4:5]
    starts = torch.tensor([visible * ratio - tokens, 1][:batch])
    candidates = None
    if role == 2:
        number = -(-visible // block_size)
        candidates = torch.randint(-1, number + 2, (batch, tokens, blocks), generator=draw).to(torch.int32)
    listed = torch.arange(visible)
    tensors = {
        "index_q": q,
        "index_weights": weights,
        "index_keys": keys,
        "start_positions": starts,
        "visible_entries": listed,
        "candidate_blocks": candidates,
    }
    attributes = {
        "compress_ratio": ratio,
        "index_topk": topk,
        "role": role,
        "candidate_topk_blocks": blocks,
        "candidate_block_size": block_size,
    }
    result = interpreter.run("Indexer", tensors, attributes, indexer_workspace_bytes=30000)
    expected, published = indexer.indexer(
        q, weights, keys, starts, listed, candidates, ratio, topk, role, blocks, block_size
    )
    assert torch.equal(result["topk_indices"], expected)
    assert ("candidate_blocks_out" in result) == (published is not None)
    if published is not None:
        assert torch.equal(result["candidate_blocks_out"], published)


def test_indexer_takes_every_tie_in_order(interpreter: Any) -> None:
    """All scores equal, over more than one block of the selection: the first k entries."""
    tensors = {
        "index_q": torch.ones(1, 1, 1, 16, dtype=torch.bfloat16),
        "index_weights": torch.ones(1, 1, 1, dtype=torch.bfloat16),
        "index_keys": torch.ones(1, 4500, 16, dtype=torch.bfloat16),
        "start_positions": torch.tensor([4499]),
        "visible_entries": torch.arange(4500),
    }
    attributes = {
        "compress_ratio": 1,
        "index_topk": 2500,
        "role": 0,
        "candidate_topk_blocks": 0,
        "candidate_block_size": 0,
    }
    result = interpreter.run("Indexer", tensors, attributes)["topk_indices"]
    assert torch.equal(result[0, 0], torch.arange(2500, dtype=torch.int32))


def test_empty_steps(interpreter: Any) -> None:
    """No tokens: empty outputs and no launch."""
    empty = interpreter.run("QuantizeDequantize", {"x": torch.zeros(0, 64)}, {"format": 0})["y"]
    assert empty.shape == (0, 64)
    tensors = expert_tensors(torch.float32, packed=False, rows=1)
    for name in ("ffn_in", "scores", "selection_bias"):
        value = tensors[name]
        assert value is not None
        tensors[name] = value[:0]
    routed = interpreter.run("MoEExperts", tensors, expert_attributes(-1))["routed_output"]
    assert routed.shape == (0, 64)
