"""Kernels under the interpreter against golden vectors: values of the published reference, not of this package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

FORMATS = {"fp8": 0, "fp4_32": 1, "fp4_16": 2}
FLOAT_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
BFLOAT16_TOLERANCE = {"rtol": 1.6e-2, "atol": 1e-3}


def as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.int8)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_dequantize(interpreter: Any, golden_ops: Path, mode: str, name: str) -> None:
    golden = load_file(golden_ops / "quant.safetensors")
    result = interpreter.run("QuantizeDequantize", {"x": golden[f"{mode}.x"]}, {"format": FORMATS[name]})
    assert torch.equal(result["y"], golden[f"{mode}.{name}.qdq"])


def test_engram_gather(interpreter: Any, golden_ops: Path) -> None:
    golden = load_file(golden_ops / "engram.safetensors")
    tensors = {
        "engram_ids": golden["f32.hash_ids"],
        "engram_rows": as_bytes(golden["f32.table"]),
        "engram_scales": as_bytes(golden["f32.table_scale"]),
    }
    result = interpreter.run("EngramGather", tensors, {"out_dtype": 1})["embeddings"]
    assert torch.equal(result, golden["f32.rows"].flatten(2))


@pytest.mark.parametrize("byte_kind", ["e4m3", "e8m0"])
def test_engram_gather_decodes_every_byte(interpreter: Any, golden_ops: Path, byte_kind: str) -> None:
    golden = load_file(golden_ops / "quant.safetensors")
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.int8)
    if byte_kind == "e4m3":
        rows, scales = every.reshape(8, 32), torch.full((8, 1), 127, dtype=torch.int8)
        expected = golden["e4m3_decode"].reshape(1, 1, 256)
    else:
        rows = torch.full((256, 32), 0x38, dtype=torch.int8)  # 1.0
        scales = every.reshape(256, 1)
        expected = golden["e8m0_decode"].repeat_interleave(32).reshape(1, 1, -1)
    ids = torch.arange(rows.shape[0]).reshape(1, 1, -1)
    tensors = {"engram_ids": ids, "engram_rows": rows, "engram_scales": scales}
    result = interpreter.run("EngramGather", tensors, {"out_dtype": 1})["embeddings"]
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", ["c0", "c1", "c2"])
def test_hyper_connection_mix(interpreter: Any, golden_ops: Path, case: str) -> None:
    golden = load_file(golden_ops / "hc_block.safetensors")
    tensors = {
        "hidden_states": golden[f"{case}.x"],
        "hc_fn": golden[f"{case}.fn"],
        "hc_scale": golden[f"{case}.scale"],
        "hc_base": golden[f"{case}.base"],
    }
    attributes = {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    result = interpreter.run("HyperConnectionMix", tensors, attributes)
    for name in ("pre", "post", "comb"):
        torch.testing.assert_close(result[name], golden[f"{case}.{name}"], **FLOAT_TOLERANCE)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("case", ["c0", "c1", "c2"])
def test_sparse_attention(interpreter: Any, golden_ops: Path, mode: str, case: str) -> None:
    golden = load_file(golden_ops / "sparse_attn.safetensors")
    q, kv, sink, indices = (golden[f"{mode}.{case}.{name}"] for name in ("q", "kv", "sink", "idx"))
    # The vectors list compressed rows only. A window at a position far before the sequence sees nothing.
    window = torch.full((q.shape[0], 1, q.shape[3]), math.nan, dtype=q.dtype)
    tensors = {
        "q": q,
        "window_kv": window,
        "start_positions": torch.full((q.shape[0],), -1000),
        "attn_sink": sink,
        "compressed_kv": kv,
        "topk_indices": indices,
    }
    attributes = {"window_size": 1, "softmax_scale": q.shape[3] ** -0.5}
    result = interpreter.run("SparseAttention", tensors, attributes)["attention_output"]
    tolerance = FLOAT_TOLERANCE if mode == "f32" else BFLOAT16_TOLERANCE
    torch.testing.assert_close(result, golden[f"{mode}.{case}.o"], **tolerance)


def experts(golden: dict[str, Tensor], case: str, part: str) -> Tensor | None:
    found = []
    while (name := f"{case}.experts.{len(found)}.{part}") in golden:
        value = golden[name]
        found.append(as_bytes(value) if value.element_size() == 1 else value)
    return torch.stack(found) if found else None


def gate_scores(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    logits = F.linear(x.float(), weight.float())
    if kind == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)


@pytest.mark.parametrize(
    ("case", "limit", "kind", "activated", "format"),
    [
        ("c0", 10.0, "sqrtsoftplus", 2, -1),
        ("c1", 0.5, "sqrtsoftplus", 3, -1),
        ("c2", 0.0, "sigmoid", 1, -1),
        ("c3", 10.0, "softmax", 2, -1),
        ("c4", 10.0, "sqrtsoftplus", 2, 0),
        ("c5", 10.0, "sqrtsoftplus", 2, 0),
    ],
)
def test_moe_experts(
    interpreter: Any, golden_ops: Path, case: str, limit: float, kind: str, activated: int, format: int
) -> None:
    golden = load_file(golden_ops / "moe.safetensors")
    x = golden[f"{case}.x"].flatten(0, 1)
    scores = gate_scores(x, golden[f"{case}.gate.weight"], kind)
    tensors = {
        "ffn_in": x,
        "scores": scores,
        "selection_bias": golden[f"{case}.gate.bias"].expand_as(scores),
        **{f"experts_{part}": experts(golden, case, f"{part}.weight") for part in ("w1", "w2", "w3")},
        **{f"experts_{part}_scale": experts(golden, case, f"{part}.scale") for part in ("w1", "w2", "w3")},
    }
    attributes = {
        "n_activated_experts": activated,
        "norm_topk_prob": 1,
        "route_scale": 1.5,
        "swiglu_limit": limit,
        "activation_format": format,
    }
    routed = interpreter.run("MoEExperts", tensors, attributes)["routed_output"]
    total = (routed + golden[f"{case}.shared"].float()).to(x.dtype)
    tolerance = BFLOAT16_TOLERANCE if x.dtype == torch.bfloat16 else FLOAT_TOLERANCE
    torch.testing.assert_close(total, golden[f"{case}.y"].flatten(0, 1), **tolerance)


@pytest.mark.parametrize("case", range(6))
def test_candidate_blocks(interpreter: Any, golden_ops: Path, case: int) -> None:
    golden = load_file(golden_ops / "candidate_blocks.safetensors")
    topk_blocks, block_size = golden[f"p{case}.params"].tolist()
    # The newest tokens choose among the most blocks; all of them would take the interpreter a minute.
    scores, keep = golden[f"p{case}.scores"][:1, -5:], golden[f"p{case}.keep"][:1, -5:]
    _, tokens, entries = scores.shape
    # Two heads, one for either sign, give every score exactly: relu(s) - relu(-s) of key component t.
    unit = torch.eye(tokens, 16).unsqueeze(0)
    keys = torch.zeros(1, entries, 16)
    keys[..., :tokens] = scores.nan_to_num(neginf=0).transpose(1, 2)
    tensors = {
        "index_q": torch.stack([unit, -unit], dim=2),
        "index_weights": torch.tensor([1.0, -1.0]).expand(1, tokens, 2),
        "index_keys": keys,
        "start_positions": torch.tensor([entries - tokens]),
        "visible_entries": torch.arange(entries),
    }
    attributes = {
        "compress_ratio": 1,
        "index_topk": 3,
        "role": 1,
        "candidate_topk_blocks": topk_blocks,
        "candidate_block_size": block_size,
    }
    blocks = interpreter.run("Indexer", tensors, attributes)["candidate_blocks_out"]
    inside = (blocks.unsqueeze(-1) == torch.arange(entries) // block_size).any(dim=2)
    position = torch.arange(entries - tokens, entries).reshape(1, -1, 1)
    visible = torch.arange(entries) <= position
    assert torch.equal(inside & visible, keep.bool() & visible)


def rotate_last(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the golden indexers (spec 5.1): 16 channels, theta 160000, YaRN 16x over 16 positions."""
    width, trained, theta, factor = 16, 16, 160000.0, 16
    frequency = theta ** (-torch.arange(0, width, 2) / width)

    def corrected(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(corrected(32)), 0), min(math.ceil(corrected(1)), width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency / factor * ramp + frequency * (1 - ramp)
    turn = torch.polar(torch.ones(1), positions.float().unsqueeze(-1) * frequency).reshape(-1, 1, width // 2)
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


@pytest.mark.parametrize(("case", "ratio"), [("r2", 2), ("r1src", 1)])
def test_indexer(interpreter: Any, golden_ops: Path, case: str, ratio: int) -> None:
    golden = {
        name.removeprefix(f"f32.{case}."): value
        for name, value in load_file(golden_ops / "indexer.safetensors").items()
        if name.startswith(f"f32.{case}.")
    }
    expected = golden["prefill.topk"]
    tokens = expected.shape[1]
    q = F.linear(golden["qr"][:, :tokens], golden["wq_b.weight"]).unflatten(-1, (16, 32))
    q = rotate_last(q, torch.arange(tokens))
    weights = F.linear(golden["x"][:, :tokens], golden["weights_proj.weight"]) * (32**-0.5 * 16**-0.5)
    visible = tokens // ratio
    tensors = {
        "index_q": q,
        "index_weights": weights,
        "index_keys": golden["k_cache_end"],
        "start_positions": torch.zeros(2, dtype=torch.int64),
        "visible_entries": torch.arange(visible),
    }
    attributes = {
        "compress_ratio": ratio,
        "index_topk": expected.shape[2],
        "role": 0,
        "candidate_topk_blocks": 0,
        "candidate_block_size": 0,
    }
    found = interpreter.run("Indexer", tensors, attributes)["topk_indices"]
    # The vectors leave -1 where an entry is out of reach; order within a row does not matter.
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
