"""Vectors of the choice of entries: candidate blocks and indexer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_ops_basic import Meta, rotary_config, runs_on
from engram_trt.export.accuracy.golden_results import Vectors, bits
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, fill, op_config
from engram_trt.export.accuracy.golden_sets import as_sets, blocks_of_mask, mask_of_blocks
from engram_trt.export.accuracy.golden_tolerance import EXACT, OPS_BF16, OPS_F32, VOID_MARGINS
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.indexer import Indexer
from engram_trt.export.modeling.rotary import inverse_frequencies, rotary_table, rotate
from engram_trt.export.modeling.weights import dequantize_fp8
from engram_trt.plugins.indexer import reference as indexing
from engram_trt.plugins.indexer.spec import CANDIDATE_SOURCE, CANDIDATE_USER, PLAIN


class CandidateBlocks(OpModule):
    """Candidate blocks from scores."""

    results = ("blocks",)

    def __init__(self, topk_blocks: int, block_size: int) -> None:
        super().__init__()
        self.topk_blocks, self.block_size = self.settings = (topk_blocks, block_size)
        self.symbols = {"scores": ("batch", "tokens", "visible_r1"), "visible": ("batch", "tokens")}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = indexing.candidate_block_scores(inputs["scores"], inputs["visible"], self.block_size)
        return {"blocks": indexing.select(scores, self.topk_blocks)}


def compare_candidate_blocks(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    modules: dict[tuple[int, int], CandidateBlocks] = {}
    for case in vectors.prefixes():
        own, prefill = f"{case}.params", f"p{case[1:]}.params"
        if own not in vectors and prefill not in vectors:
            continue
        topk_blocks, block_size = vectors.input(own if own in vectors else prefill).tolist()
        scores = vectors.input(f"{case}.scores")
        batch, tokens, width = scores.shape
        visible = torch.full((batch, tokens), width)
        if f"{case}.lens" in vectors:
            visible = vectors.input(f"{case}.lens").reshape(1, -1).expand(batch, tokens).contiguous()
        key = (topk_blocks, block_size)
        module = modules.setdefault(key, CandidateBlocks(*key))
        blocks = runner.run(module, op_config(), {"scores": scores, "visible": visible})["blocks"]
        keep = mask_of_blocks(blocks, block_size, width)
        vectors.check(f"{case}.keep", keep, EXACT, want=bits(vectors.input(f"{case}.keep")))


class IndexKeys(OpModule):
    """Index keys of entries, from their latents."""

    results = ("keys",)

    def __init__(self, indexer: Indexer, frequencies: Tensor, head_dim: int) -> None:
        super().__init__()
        self.indexer, self.settings = indexer, (indexer.cache_quantization, indexer.config.norm_eps)
        self.register_buffer("frequencies", frequencies)
        self.symbols = {"latent": ("batch", "tokens", head_dim), "positions": ("batch", "tokens")}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        table = rotary_table(inputs["positions"], self.get_buffer("frequencies"))
        return {"keys": self.indexer.keys(inputs["latent"], table)}


class IndexLists(OpModule):
    """`Indexer`, and the scores that never leave the op."""

    def __init__(self, indexer: Indexer, frequencies: Tensor, config: ModelConfig) -> None:
        super().__init__()
        self.indexer, self.config = indexer, config
        self.settings = (config.digest(), indexer.role, indexer.cache_quantization, indexer.wq_b.activation_format)
        self.register_buffer("frequencies", frequencies)
        ratio, token = indexer.layer.compress_ratio, ("batch", "tokens")
        self.symbols = {
            "attn_in": (*token, config.dim),
            "q_latent": (*token, config.q_lora_rank),
            "positions": token,
            "start_positions": ("batch",),
            "index_keys": ("batch", f"entries_r{ratio}", config.index_head_dim),
            "visible_entries": (f"visible_r{ratio}",),
        }
        self.results = ("topk", "scores")
        if indexer.role == CANDIDATE_USER:
            self.symbols["candidate_blocks"] = (*token, config.candidate_topk_blocks)
        if indexer.role == CANDIDATE_SOURCE:
            self.results = ("topk", "scores", "blocks")

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        indexer = self.indexer
        table = rotary_table(inputs["positions"], self.get_buffer("frequencies"))
        arguments = [inputs[name] for name in ("index_keys", "start_positions", "visible_entries")]
        candidates = inputs.get("candidate_blocks")
        topk, blocks = indexer(inputs["attn_in"], inputs["q_latent"], table, *arguments, candidates)
        results = {"topk": topk, "scores": self.scores(inputs, table)}
        return results if blocks is None else results | {"blocks": blocks}

    def scores(self, inputs: dict[str, Tensor], table: tuple[Tensor, Tensor]) -> Tensor:
        """Scores after masking, as the op computes them inside."""
        indexer, config = self.indexer, self.config
        heads, width = config.index_n_heads, config.index_head_dim
        queries = rotate(indexer.wq_b(inputs["q_latent"]).unflatten(-1, (heads, width)), table)
        weights = indexer.weights_proj(inputs["attn_in"]) * (width**-0.5 * heads**-0.5)
        tokens = inputs["attn_in"].shape[1]
        visible = indexing.visible_counts(inputs["start_positions"], tokens, indexer.layer.compress_ratio)
        scores = indexing.index_scores(
            indexer.rounded(queries), weights, inputs["index_keys"], visible, inputs["visible_entries"]
        )
        if indexer.role == CANDIDATE_USER:
            return indexing.inside_candidates(scores, inputs["candidate_blocks"], config.candidate_block_size)
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerCase:
    """Sizes and role of one case of `indexer`, all taken from its tensors."""

    mode: str
    ratio: int
    role: int
    block_size: int
    num_blocks: int
    index_topk: int

    @classmethod
    def of(cls, vectors: Vectors, case: str) -> IndexerCase | None:
        """From tensor names such as `f32.r1src.prefill.candidates`; None if the name says no ratio."""
        mode, _, kind = case.partition(".")
        match = re.match(r"r(\d+)", kind)
        if match is None:
            return None
        names = [name for name in vectors.names if name.startswith(f"{case}.")]
        published = [name for name in names if name.endswith(".candidates")]
        used = [name for name in names if name.endswith(".candidates_in")]
        masks = [bits(vectors.tensors[name]) for name in (*published, *used)]
        block_size = _block_size(masks) if masks else 1
        num_blocks = max((int(blocks_of_mask(mask, block_size, 0).ge(0).sum(-1).max()) for mask in masks), default=0)
        topk = max((vectors.tensors[name].shape[-1] for name in names if name.endswith(".topk")), default=1)
        role = CANDIDATE_SOURCE if published else CANDIDATE_USER if used else PLAIN
        return cls(
            mode=mode,
            ratio=int(match[1]),
            role=role,
            block_size=block_size,
            num_blocks=num_blocks,
            index_topk=topk,
        )

    @property
    def compute(self) -> ComputeConfig:
        """Numerics of the mode."""
        quantised = self.mode.endswith("_q")
        dtype = torch.bfloat16 if self.mode.startswith("bf16") else torch.float32
        return ComputeConfig(dtype=dtype, activation_quantization=quantised, cache_quantization=quantised)

    @property
    def layer_id(self) -> int:
        """The layer of the schedule that plays the role and owns keys."""
        return 1 if self.role == CANDIDATE_USER else 0

    def schedule(self) -> dict[str, Any]:
        """Config values that give `layer_id` its role; a user of candidates needs a source below it."""
        sources = tuple(range(self.layer_id + 1))
        values = {
            "n_layers": len(sources),
            "compress_ratios": (self.ratio,) * len(sources),
            "kv_source_layers": sources,
            "index_source_layers": sources,
            "index_topk": self.index_topk,
        }
        if self.role != PLAIN:
            # The vectors may select more entries than the blocks they keep hold for certain.
            values |= {"candidate_source_layer": 0, "candidate_block_size": self.block_size}
            values["candidate_topk_blocks"] = self.num_blocks
        return values


def _block_size(masks: list[Tensor]) -> int:
    """Entries per block: where masks change between neighbours is always a multiple of it."""
    size = 0
    for mask in masks:
        changes = torch.nonzero(mask[..., 1:] != mask[..., :-1])[:, -1] + 1
        for change in set(changes.tolist()):
            size = math.gcd(size, change)
    return size or max(mask.shape[-1] for mask in masks)


def compare_indexer(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    if "rope" not in meta:
        vectors.skip(vectors.names, "ops/index.json does not say which rotary table the cases used")
        return
    for name in vectors.prefixes(2):
        case = IndexerCase.of(vectors, name)
        if case is None or f"{name}.x" not in vectors:
            continue
        if runs_on(runner, vectors, f"{name}.", vectors.input(f"{name}.x")):
            _compare_indexer_case(vectors, runner, name, case, [float(value) for value in meta["rope"]])


def _compare_indexer_case(vectors: Vectors, runner: Runner, name: str, case: IndexerCase, rope: list[float]) -> None:
    x, latent, q_latent = (vectors.input(f"{name}.{part}") for part in ("x", "latent", "qr"))
    weights = _indexer_weights(vectors, name)
    heads, width = weights["weights_proj.weight"].shape[0], weights["wk.weight"].shape[0]
    sizes = {
        "dim": x.shape[2],
        "q_lora_rank": q_latent.shape[2],
        "head_dim": latent.shape[2],
        "index_n_heads": heads,
        "index_head_dim": width,
        **case.schedule(),
    }
    config, _ = rotary_config(rope, **sizes)
    indexer = Indexer(config, config.layer(case.layer_id), case.compute)
    fill(indexer, weights)
    frequencies = inverse_frequencies(config, case.ratio)
    batch, entries = latent.shape[:2]
    positions = (torch.arange(entries) * case.ratio).expand(batch, entries).contiguous()
    key_module = IndexKeys(indexer, frequencies, config.head_dim)
    keys = runner.run(key_module, config, {"latent": latent, "positions": positions})["keys"]
    stored = vectors.input(f"{name}.k_cache_end")[:, :entries]
    limit = OPS_BF16 if case.mode.startswith("bf16") else OPS_F32
    vectors.check(f"{name}.k_cache_end", keys, limit, "index keys", want=stored)

    module = IndexLists(indexer, frequencies, config)
    for call in sorted({n.split(".")[2] for n in vectors.names if re.fullmatch(rf"{re.escape(name)}\.\w+\.topk", n)}):
        # All keys are there from the start: entries that are not visible yet must not matter.
        _compare_index_call(vectors, runner, module, f"{name}.{call}", case, {"x": x, "qr": q_latent, "keys": keys})


def _indexer_weights(vectors: Vectors, name: str) -> dict[str, Tensor]:
    weights = {
        f"{part}.weight": vectors.input(f"{name}.{part}.weight") for part in ("k_norm", "wk", "weights_proj", "wq_b")
    }
    if f"{name}.wq_b.scale" in vectors:
        scale = vectors.input(f"{name}.wq_b.scale")
        weights["wq_b.weight"] = dequantize_fp8(weights["wq_b.weight"], scale, torch.float32)
    return weights


def _compare_index_call(
    vectors: Vectors, runner: Runner, module: IndexLists, call: str, case: IndexerCase, values: dict[str, Tensor]
) -> None:
    """A prefill from position 0, or the one-token step its name gives the position of."""
    scores = vectors.input(f"{call}.scores")
    batch, tokens, width = scores.shape
    step = re.search(r"step(\d+)$", call)
    start = int(step[1]) if step else 0
    inputs = {
        "attn_in": values["x"][:, start : start + tokens],
        "q_latent": values["qr"][:, start : start + tokens],
        "positions": (start + torch.arange(tokens)).expand(batch, tokens).contiguous(),
        "start_positions": torch.full((batch,), start),
        "index_keys": values["keys"],
        "visible_entries": torch.arange(values["keys"].shape[1]),
    }
    if f"{call}.candidates_in" in vectors:
        mask = bits(vectors.input(f"{call}.candidates_in"))
        inputs["candidate_blocks"] = blocks_of_mask(mask, case.block_size, case.num_blocks)
    got = runner.run(module, module.config, inputs)
    limit = OPS_BF16 if case.mode.startswith("bf16") else OPS_F32
    vectors.check(f"{call}.scores", got["scores"][..., :width], limit)
    entries = values["keys"].shape[1]
    void = torch.zeros(batch, tokens, dtype=torch.bool)
    if f"{call}.margin" in vectors:
        void = vectors.input(f"{call}.margin") < VOID_MARGINS.get(case.mode, 0.0)
    wanted = as_sets(vectors.input(f"{call}.topk"), entries)[~void]
    vectors.check(f"{call}.topk", as_sets(got["topk"], entries)[~void], EXACT, want=wanted)
    if "blocks" in got and f"{call}.candidates" in vectors:
        positions = inputs["positions"].unsqueeze(-1)
        visible = torch.arange(width) < (positions + 1) // case.ratio
        keep = mask_of_blocks(got["blocks"], case.block_size, width)
        stored = bits(vectors.input(f"{call}.candidates"))
        chosen = ~void if case.mode != "f32" else torch.ones_like(void)
        vectors.check(f"{call}.candidates", (keep & visible)[chosen], EXACT, want=(stored & visible)[chosen])
