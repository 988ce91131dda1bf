"""Vectors of the compressor and of sparse attention."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_ops_basic import BFLOAT16_ONLY_TORCH, Meta, runs_on
from engram_trt.export.accuracy.golden_results import Vectors
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, fill, op_config
from engram_trt.export.accuracy.golden_tolerance import op_limit
from engram_trt.export.modeling.compressor import Compressor
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.plugins.sparse_attention.torch_op import sparse_attention


class CompressorModule(OpModule):
    """`Compressor` with its states as inputs and outputs."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, ratio: int, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.compressor, self.settings = Compressor(config, compute, ratio), (ratio, config.norm_eps)
        fill(self.compressor, weights)
        self.symbols = {"attn_in": ("batch", "tokens", config.dim), "start_positions": ("batch",)}
        self.states = ("kv_state", "score_state") if ratio > 1 else ()
        self.symbols |= {name: ("batch", "state_ring", config.head_dim) for name in self.states}
        self.results = ("latent", *(f"{name}_out" for name in self.states))

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        latent = self.compressor(inputs["attn_in"], inputs["start_positions"], inputs)
        return {"latent": latent, **{f"{name}_out": inputs[name] for name in self.states}}


def compare_compressor(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    for case in vectors.prefixes(2):
        match = re.fullmatch(r"(\w+)\.r(\d+)", case)
        if match is None:
            continue
        ratio = int(match[2])
        weights = {f"{part}.weight": vectors.input(f"{case}.{part}.weight") for part in ("wkv", "norm")}
        if ratio > 1:
            weights["wgate.weight"] = vectors.input(f"{case}.wgate.weight")
        lengths = sorted(
            {name.split(".")[2] for name in vectors.names if re.match(rf"{re.escape(case)}\.S\d+\.x", name)}
        )
        dtype = vectors.input(f"{case}.{lengths[0]}.x").dtype if lengths else torch.float32
        if dtype == torch.bfloat16 and runner.name != "torch":
            names = [name for name in vectors.names if name.startswith(f"{case}.")]
            vectors.skip(names, BFLOAT16_ONLY_TORCH, f"{case}.*")
            continue
        head_dim, dim = weights["wkv.weight"].shape
        config = op_config(dim=dim, head_dim=head_dim)
        module = CompressorModule(config, ComputeConfig(dtype=dtype), ratio, weights)
        for length in lengths:
            _compare_compressed(vectors, runner, module, config, ratio, f"{case}.{length}")


def _compare_compressed(
    vectors: Vectors, runner: Runner, module: CompressorModule, config: ModelConfig, ratio: int, case: str
) -> None:
    """One prefill and the one-token steps after it; only complete groups have a vector."""
    x = vectors.input(f"{case}.x")
    prefill = int(case.rpartition(".S")[2])
    batch, total = x.shape[:2]
    # What was never written must not matter, so it starts as NaN.
    states = {name: torch.full((batch, total + ratio, config.head_dim), math.nan) for name in module.states}
    start = 0
    for name, tokens in [("prefill", prefill), *((f"step{n}", 1) for n in range(total - prefill))]:
        inputs = {"attn_in": x[:, start : start + tokens], "start_positions": torch.full((batch,), start), **states}
        got = runner.run(module, config, inputs)
        states = {state: got[f"{state}_out"] for state in module.states}
        complete = (start + tokens) // ratio - start // ratio
        if f"{case}.{name}" in vectors:
            latent = got["latent"][:, :complete]
            vectors.check(f"{case}.{name}", latent, op_limit(x.dtype), "latent")
        start += tokens


class ListedAttention(OpModule):
    """The op `SparseAttention` with nothing in its window."""

    results = ("o",)

    def __init__(self, config: ModelConfig, num_listed: int) -> None:
        super().__init__()
        self.config, self.settings = config, (config.window_size,)
        heads, width = config.n_heads, config.head_dim
        self.symbols = {
            "q": ("batch", "tokens", heads, width),
            "window_kv": ("batch", "window_ring", width),
            "start_positions": ("batch",),
            "sink": (heads,),
            "kv": ("batch", "entries_r1", width),
            "idx": ("batch", "tokens", num_listed),
        }

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window, scale = self.config.window_size, self.config.head_dim**-0.5
        ordered = (inputs[name] for name in self.symbols)
        return {"o": sparse_attention(*ordered, window, scale)}


def compare_sparse_attn(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    for case in vectors.prefixes(2):
        if f"{case}.q" not in vectors:
            continue
        q, kv, idx = (vectors.input(f"{case}.{name}") for name in ("q", "kv", "idx"))
        if not runs_on(runner, vectors, f"{case}.", q):
            continue
        batch, tokens, heads, width = q.shape
        config = op_config(n_heads=heads, head_dim=width, index_topk=idx.shape[2], window_size=1)
        inputs = {
            "q": q,
            "kv": kv,
            "idx": idx,
            "sink": vectors.input(f"{case}.sink"),
            # Positions before the sequence's beginning: the window holds nothing and must not be read.
            "start_positions": torch.full((batch,), -tokens - 1),
            "window_kv": torch.full((batch, 1, width), math.nan, dtype=kv.dtype),
        }
        got = runner.run(ListedAttention(config, idx.shape[2]), config, inputs)
        vectors.check(f"{case}.o", got["o"], op_limit(q.dtype))
