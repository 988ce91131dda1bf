"""Vectors of the small ops: stream mixes, norms, rotation, window slots, rounding, quantised linears, head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_results import Vectors
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, fill, op_config
from engram_trt.export.accuracy.golden_tolerance import EXACT, ROTARY, op_limit
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.hyper_connections import collapse, expand
from engram_trt.export.modeling.layers import Linear, RMSNorm
from engram_trt.export.modeling.rotary import inverse_frequencies, rotate
from engram_trt.export.stages.embedding import EmbeddingStage
from engram_trt.plugins.hyper_connection_mix.reference import split_mixes
from engram_trt.plugins.hyper_connection_mix.torch_op import hyper_connection_mix
from engram_trt.plugins.primitives import ring_slots
from engram_trt.plugins.sparse_attention.reference import window_positions

Meta = Mapping[str, Any]
BFLOAT16_ONLY_TORCH = "bfloat16: ONNX Runtime has no kernels for it on the CPU"


def runs_on(runner: Runner, vectors: Vectors, prefix: str, *tensors: Tensor) -> bool:
    """Whether a back end can take these inputs; if not, everything below `prefix` is noted as not compared."""
    if runner.name == "torch" or all(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return True
    names = [name for name in vectors.names if name.startswith(prefix)]
    vectors.skip(names, BFLOAT16_ONLY_TORCH, f"{prefix}*")
    return False


class SplitMixes(OpModule):
    """pre, post and comb from projected numbers."""

    results = ("pre", "post", "comb")

    def __init__(self, hc_mult: int, iterations: int, eps: float) -> None:
        super().__init__()
        self.split = self.settings = (hc_mult, iterations, eps)
        width = (2 + hc_mult) * hc_mult
        self.symbols = {"mixes": ("tokens", width), "scale": (3,), "base": (width,)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        hc_mult, iterations, eps = self.split
        mixed = split_mixes(inputs["mixes"], inputs["scale"], inputs["base"], hc_mult, iterations, eps)
        return dict(zip(self.results, mixed, strict=True))


def compare_hc_split_sinkhorn(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    modules: dict[tuple[int, int], SplitMixes] = {}
    for case in vectors.prefixes():
        hc_mult, iterations = vectors.input(f"{case}.hc_iters").tolist()
        key = (hc_mult, iterations)
        module = modules.setdefault(key, SplitMixes(*key, float(meta.get("eps", 1e-6))))
        inputs = {name: vectors.input(f"{case}.{name}") for name in module.symbols}
        for name, value in runner.run(module, op_config(hc_mult=hc_mult), inputs).items():
            vectors.check(f"{case}.{name}", value, op_limit(torch.float32))


class StreamMixes(OpModule):
    """The op `HyperConnectionMix`, and reading from and writing to the streams."""

    results = ("pre", "post", "comb", "hc_pre_out", "hc_post_out")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.settings = config, (config.digest(),)
        n, dim, mixes = config.hc_mult, config.dim, config.hc_mixes
        token = ("batch", "tokens")
        self.symbols = {
            "x": (*token, n, dim),
            "fn": (mixes, n * dim),
            "scale": (3,),
            "base": (mixes,),
            "pre_mix_in": (*token, n),
            "sub": (*token, dim),
            "post_in": (*token, n),
            "comb_in": (*token, n, n),
        }

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        config = self.config
        settings = (config.hc_sinkhorn_iters, config.hc_eps, config.norm_eps)
        pre, post, comb = hyper_connection_mix(inputs["x"], inputs["fn"], inputs["scale"], inputs["base"], *settings)
        return {
            "pre": pre,
            "post": post,
            "comb": comb,
            "hc_pre_out": collapse(inputs["x"], inputs["pre_mix_in"]),
            "hc_post_out": expand(inputs["sub"], inputs["x"], inputs["post_in"], inputs["comb_in"]),
        }


class FirstStreams(OpModule):
    """Stage `embedding`: the reading mix every pass starts with."""

    results = ("pre_mix",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stage = EmbeddingStage(config, ComputeConfig())
        fill(self.stage, {"embed.weight": torch.zeros(config.vocab_size, config.dim)})
        self.symbols = {"token_ids": ("batch", "tokens"), "start_positions": ("batch",)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.results, self.stage(inputs, self.results), strict=True))


def compare_hc_block(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    modules: dict[tuple[int, ...], tuple[StreamMixes, FirstStreams]] = {}
    for case in vectors.prefixes():
        x = vectors.input(f"{case}.x")
        if not runs_on(runner, vectors, f"{case}.", x):
            continue
        config = op_config(
            hc_mult=x.shape[2],
            dim=x.shape[3],
            hc_sinkhorn_iters=int(meta.get("iters", 20)),
            hc_eps=float(meta.get("hc_eps", 1e-6)),
            norm_eps=float(meta.get("norm_eps", 1e-20)),
        )
        modules.setdefault(tuple(x.shape[2:]), (StreamMixes(config), FirstStreams(config)))
        mixes, first = modules[tuple(x.shape[2:])]
        names = ("x", "fn", "scale", "base", "pre_mix_in", "sub")
        inputs = {name: vectors.input(f"{case}.{name}") for name in names}
        inputs |= {f"{name}_in": vectors.input(f"{case}.{name}") for name in ("post", "comb")}
        for name, value in runner.run(mixes, config, inputs).items():
            vectors.check(f"{case}.{name}", value, op_limit(value.dtype))
        start = {
            "token_ids": torch.zeros(x.shape[:2], dtype=torch.int64),
            "start_positions": torch.zeros(x.shape[0], dtype=torch.int64),
        }
        vectors.check(f"{case}.identity_pre_mix", runner.run(first, config, start)["pre_mix"], EXACT)


class Norm(OpModule):
    """`RMSNorm`."""

    results = ("y",)

    def __init__(self, weight: Tensor, eps: float, num_axes: int) -> None:
        super().__init__()
        self.norm, self.settings = RMSNorm(weight.shape[0], eps), (eps,)
        fill(self.norm, {"weight": weight})
        self.symbols = {"x": (*("batch", "tokens", "selected")[: num_axes - 1], weight.shape[0])}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.norm(inputs["x"])}


def compare_rmsnorm(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    for case in vectors.prefixes():
        x, weight = vectors.input(f"{case}.x"), vectors.input(f"{case}.weight")
        if runs_on(runner, vectors, f"{case}.", x):
            y = runner.run(Norm(weight, float(meta.get("eps", 1e-20)), x.dim()), op_config(), {"x": x})["y"]
            vectors.check(f"{case}.y", y, op_limit(y.dtype))


class Tables(OpModule):
    """Stage `embedding`: cos and sin at given positions."""

    results = ("cos", "sin")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stage = EmbeddingStage(config, ComputeConfig())
        fill(self.stage, {"embed.weight": torch.zeros(config.vocab_size, config.dim)})
        (self.family,) = self.stage.families
        self.settings = (self.family,)
        self.symbols = {"token_ids": ("batch", "tokens"), "start_positions": ("batch",)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = tuple(f"{self.family}_rotary_{part}" for part in self.results)
        return dict(zip(self.results, self.stage(inputs, names), strict=True))


class Rotation(OpModule):
    """Rotation by a table, and back."""

    results = ("rotated", "inverse")

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        table = ("batch", "tokens", width)
        self.symbols = {"x": ("batch", "tokens", heads, width), "cos": table, "sin": table}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        table = inputs["cos"], inputs["sin"]
        return {"rotated": rotate(inputs["x"], table), "inverse": rotate(inputs["x"], table, inverse=True)}


def rotary_config(params: list[float], **sizes: Any) -> tuple[ModelConfig, int]:
    """A model with one table family, and the compress ratio that selects it.

    Args:
        params: rotated width, original_seq_len, base, factor, beta_fast, beta_slow.
        sizes: further values of the model; they may name their own schedule.
    """
    width, original, base, factor, fast, slow = params
    ratio = 2 if original > 0 else 0
    sources = (0,) if ratio else ()
    values: dict[str, Any] = {
        "rope_head_dim": int(width),
        "head_dim": int(width),
        "index_head_dim": int(width),
        "original_seq_len": int(original),
        "rope_theta": base,
        "compress_rope_theta": base,
        "rope_factor": factor,
        "beta_fast": fast,
        "beta_slow": slow,
        "compress_ratios": (ratio,),
        "kv_source_layers": sources,
        "index_source_layers": sources,
    }
    return op_config(**(values | sizes)), ratio


def compare_rope(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    positions = vectors.input("positions").to(torch.int64)
    rotations: dict[tuple[int, int], Rotation] = {}
    for family in vectors.prefixes():
        config, ratio = rotary_config(vectors.input(f"{family}.params").tolist())
        frequencies = inverse_frequencies(config, ratio)
        vectors.check(f"{family}.freqs_at_pos1_angle", frequencies, ROTARY, "tables")
        # One position per batch row: a step starts anywhere.
        step = {"token_ids": torch.zeros(len(positions), 1, dtype=torch.int64), "start_positions": positions}
        table = runner.run(Tables(config), config, step)
        vectors.check(f"{family}.cos", table["cos"][:, 0, ::2], ROTARY, "tables")
        vectors.check(f"{family}.sin", table["sin"][:, 0, 1::2], ROTARY, "tables")
        for case in sorted({name.split(".")[1] for name in vectors.names if re.fullmatch(rf"{family}\.\w+\.x", name)}):
            x = vectors.input(f"{family}.{case}.x")
            if not runs_on(runner, vectors, f"{family}.{case}.", x):
                continue
            shape = (x.shape[2], x.shape[3])
            module = rotations.setdefault(shape, Rotation(*shape))
            inputs = {"x": x, **{name: value.transpose(0, 1).contiguous() for name, value in table.items()}}
            for name, value in runner.run(module, config, inputs).items():
                vectors.check(f"{family}.{case}.{name}", value, op_limit(x.dtype))


class WindowSlots(OpModule):
    """Ring slots each token of a step sees."""

    results = ("slots",)

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.settings = window, (window,)
        self.symbols = {
            "token_ids": ("batch", "tokens"),
            "start_positions": ("batch",),
            "ring": ("batch", "window_ring", 1),
        }

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        listed = window_positions(inputs["start_positions"], inputs["token_ids"].shape[1], self.window)
        return {"slots": torch.where(listed >= 0, ring_slots(listed, inputs["ring"]), -1)}


def compare_window_idxs(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    """Lists are compared as the sequences of their valid slots: where -1 stands is the reference's own matter."""
    modules: dict[int, WindowSlots] = {}
    for name in vectors.names:
        match = re.fullmatch(r"w(\d+)\.s(\d+)\.p(\d+)", name)
        if match is None:
            continue
        window, tokens, start = (int(part) for part in match.groups())
        # A prefill lists rows of its own pass, a later step the slots of a ring of just the window.
        ring = window if start else max(tokens, window)
        module = modules.setdefault(window, WindowSlots(window))
        inputs = {
            "token_ids": torch.zeros(1, tokens, dtype=torch.int64),
            "start_positions": torch.tensor([start]),
            "ring": torch.zeros(1, ring, 1),
        }
        slots = runner.run(module, op_config(window_size=window), inputs)["slots"]
        want = vectors.input(name)
        width = max(slots.shape[2], want.shape[2])
        vectors.check(name, _valid_first(slots, width), EXACT, "slots", want=_valid_first(want, width))
    reason = "indices of the draft stages: drafting is not part of this version"
    vectors.skip([name for name in vectors.names if name.startswith("dspark")], reason, "dspark.*")


def _valid_first(indices: Tensor, width: int) -> Tensor:
    """Entries that are not -1 in their order, then -1, in `width` columns."""
    padded = F.pad(indices.to(torch.int64), (0, width - indices.shape[-1]), value=-1)
    order = torch.sort((padded < 0).to(torch.int64), dim=-1, stable=True).indices
    return padded.gather(-1, order)


class HeadParts(OpModule):
    """Stage `head` in its steps."""

    results = ("collapsed", "normed", "logits_all")

    def __init__(self, norm: Tensor, head: Tensor, hc_mult: int, eps: float) -> None:
        super().__init__()
        vocab, dim = head.shape
        self.settings = (eps,)
        self.norm, self.head = RMSNorm(dim, eps), Linear(dim, vocab, torch.float32)
        fill(self, {"norm.weight": norm, "head.weight": head})
        self.symbols = {"streams": ("batch", "tokens", hc_mult, dim), "pre_mix": ("batch", "tokens", hc_mult)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        collapsed = collapse(inputs["streams"], inputs["pre_mix"])
        normed = self.norm(collapsed)
        return {"collapsed": collapsed, "normed": normed, "logits_all": self.head(normed)}


def compare_head(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    streams = vectors.input("streams")
    if not runs_on(runner, vectors, "", streams):
        return
    norm, head, eps = vectors.input("norm_weight"), vectors.input("head_weight"), float(meta.get("norm_eps", 1e-20))
    module = HeadParts(norm, head, streams.shape[2], eps)
    config = op_config(hc_mult=streams.shape[2], dim=streams.shape[3])
    got = runner.run(module, config, {"streams": streams, "pre_mix": vectors.input("pre_mix")})
    for name, value in got.items():
        vectors.check(name, value, op_limit(streams.dtype))
    vectors.check("logits_last", got["logits_all"][:, -1], op_limit(streams.dtype))
