"""Vectors of the ops with large weights: Engram and mixture of experts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.model import ModelConfig
from engram_trt.export.accuracy.golden_ops_basic import Meta, runs_on
from engram_trt.export.accuracy.golden_results import Vectors, bits
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, fill, op_config
from engram_trt.export.accuracy.golden_sets import sorted_by_index
from engram_trt.export.accuracy.golden_tolerance import EXACT, LINEAR_BF16, OPS_F32, op_limit
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.engram import Engram
from engram_trt.export.modeling.moe import EXPERT_SCALES, EXPERT_WEIGHTS, MoE
from engram_trt.export.modeling.weights import dequantize_fp8
from engram_trt.plugins.engram_gather.torch_op import engram_gather
from engram_trt.plugins.moe_experts import reference

MATRICES = ("w1", "w2", "w3")


def mode_compute(mode: str) -> ComputeConfig:
    """Numerics of a mode's name."""
    quantised = mode.endswith("_q")
    dtype = torch.bfloat16 if mode.startswith("bf16") else torch.float32
    return ComputeConfig(dtype=dtype, activation_quantization=quantised, cache_quantization=quantised)


class EngramModule(OpModule):
    """`Engram` in its steps, with and without image positions."""

    results = ("rows", "kv", "out", "out_masked")

    def __init__(self, config: ModelConfig, compute: ComputeConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.engram, self.settings = Engram(config, compute), (config.digest(), compute)
        fill(self.engram, weights)
        token, width = ("batch", "tokens"), config.engram_head_dim
        self.symbols = {
            "x": (*token, config.hc_mult, config.dim),
            "hash_ids": (*token, config.engram_columns),
            "image_mask": token,
            "table": ("table_rows", width),
            "table_scale": ("table_rows", width // 32),
        }

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        engram, table = self.engram, (inputs["table"], inputs["table_scale"])
        rows = engram_gather(inputs["hash_ids"], *table, engram.out_dtype)
        return {
            "rows": rows,
            "kv": engram.wkv(rows),
            "out": engram(inputs["x"], inputs["hash_ids"], *table, None),
            "out_masked": engram(inputs["x"], inputs["hash_ids"], *table, inputs["image_mask"]),
        }


def compare_engram(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    for mode in vectors.prefixes():
        x, table = vectors.input(f"{mode}.x"), vectors.input(f"{mode}.table")
        if not runs_on(runner, vectors, f"{mode}.", x):
            continue
        hash_ids, wkv = vectors.input(f"{mode}.hash_ids"), vectors.input(f"{mode}.wkv")
        if f"{mode}.wkv_scale" in vectors:
            wkv = dequantize_fp8(wkv, vectors.input(f"{mode}.wkv_scale"), torch.float32)
        weights = {name: vectors.input(f"{mode}.{name}") for name in ("q_weight", "k_weight")}
        config = _engram_config(x, hash_ids.shape[2], table.shape[1], float(meta.get("norm_eps", 1e-20)))
        module = EngramModule(config, mode_compute(mode), weights | {"wkv.weight": wkv})
        inputs = {
            "x": x,
            "hash_ids": hash_ids.to(torch.int64),
            "image_mask": ~bits(vectors.input(f"{mode}.text_mask")),
            "table": table.view(torch.int8),
            "table_scale": vectors.input(f"{mode}.table_scale").view(torch.int8),
        }
        got = runner.run(module, config, inputs)
        rows = got["rows"].reshape(*hash_ids.shape, -1)
        vectors.check(f"{mode}.rows", rows, EXACT)
        linear = LINEAR_BF16 if mode == "bf16_q" else op_limit(x.dtype)
        vectors.check(f"{mode}.kv", got["kv"], linear)
        for name in ("out", "out_masked"):
            vectors.check(f"{mode}.{name}", got[name], op_limit(x.dtype))


def _engram_config(x: Tensor, columns: int, width: int, eps: float) -> ModelConfig:
    """A model whose Engram has this many columns; how they split into n-grams and heads does not matter here."""
    rows = EngramLayout.derive((0,), 2, 2, columns, 2).num_embeddings
    return op_config(
        dim=x.shape[3],
        hc_mult=x.shape[2],
        norm_eps=eps,
        engram_layer_ids=(0,),
        engram_num_embeddings=rows,
        engram_max_ngram_size=2,
        engram_vocab_size=2,
        engram_n_heads=columns,
        engram_head_dim=width,
        engram_compressed_vocab_size=2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCase:
    """What a case of `moe` was computed with."""

    mode: str
    swiglu_limit: float
    score_func: str

    @classmethod
    def parse(cls, text: str) -> list[ExpertCase]:
        """From the description in `index.json`: `...: mode/limit/score/vl or -/routed/active; ...`.

        `..` stands for the middle of the first case.
        """
        cases: list[ExpertCase] = []
        for entry in text.rpartition(":")[2].split(";"):
            fields = entry.strip().split("/")
            if ".." in fields and cases:
                fields[2] = cases[0].score_func
            if len(fields) < 3:
                continue
            cases.append(cls(mode=fields[0], swiglu_limit=float(fields[1]), score_func=fields[2]))
        return cases


class ExpertModule(OpModule):
    """`MoE` with the choice, one expert and the shared expert in view."""

    def __init__(
        self, config: ModelConfig, compute: ComputeConfig, weights: dict[str, Tensor], experts: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.config, self.moe = config, MoE(config, compute)
        self.settings = (config.digest(), compute)
        fill(self.moe, weights)
        self.dtype = compute.dtype
        token = ("batch", "tokens")
        self.symbols = {"x": (*token, config.dim), "image_mask": token}
        self.symbols |= {name: tuple(value.shape) for name, value in experts.items()}
        self.results = ("gate_idx", "gate_w", "gate_idx_img", "gate_w_img", "shared", "expert0", "y", "y_img")

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        config, rows, mask = self.config, inputs["x"].flatten(0, 1), inputs["image_mask"]
        image = mask if config.has_vision else None
        text = torch.zeros_like(mask) if config.has_vision else None
        chosen, weights = self.choice(rows, text)
        chosen_image, weights_image = self.choice(rows, image)
        return {
            "gate_idx": chosen,
            "gate_w": weights,
            "gate_idx_img": chosen_image,
            "gate_w_img": weights_image,
            "shared": self.moe.shared_experts(rows),
            "expert0": self.expert(rows, inputs),
            "y": self.moe(inputs["x"], text, inputs),
            "y_img": self.moe(inputs["x"], image, inputs),
        }

    def choice(self, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, with the bias the mask picks."""
        config = self.config
        scores, bias = self.moe.gate(rows, None if mask is None else mask.reshape(-1))
        routing = (config.n_activated_experts, int(config.norm_topk_prob), config.route_scale)
        return reference.choose_experts(scores, bias, *routing)

    def expert(self, rows: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """The first expert with weight one."""
        matrices = []
        for name, scale in zip(EXPERT_WEIGHTS, EXPERT_SCALES, strict=True):
            matrix = inputs[name][0]
            if scale in inputs:
                matrix = reference.dequantize_fp4(matrix, inputs[scale][0])
            matrices.append(matrix.to(self.dtype))
        ones = torch.ones_like(rows[:, :1], dtype=torch.float32)
        w1, w2, w3 = matrices
        return reference.expert(rows, w1, w2, w3, ones, self.config.swiglu_limit, self.moe.activation_format)


def compare_moe(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    described = ExpertCase.parse(str(meta.get("cases", "")))
    for case in vectors.prefixes():
        match = re.fullmatch(r"c(\d+)", case)
        if match is None or f"{case}.x" not in vectors:
            continue
        x = vectors.input(f"{case}.x")
        if int(match[1]) >= len(described):
            names = [name for name in vectors.names if name.startswith(f"{case}.")]
            reason = "ops/index.json does not say which clamp and score function the case used"
            vectors.skip(names, reason, f"{case}.*")
        elif runs_on(runner, vectors, f"{case}.", x):
            _compare_experts(vectors, runner, case, described[int(match[1])], float(meta.get("route_scale", 1.0)))


def _compare_experts(vectors: Vectors, runner: Runner, case: str, described: ExpertCase, route_scale: float) -> None:
    x, gate = vectors.input(f"{case}.x"), vectors.input(f"{case}.gate.weight")
    experts = _expert_tensors(vectors, case, gate.shape[0])
    weights = {"gate.weight": gate, "gate.bias": vectors.input(f"{case}.gate.bias")}
    sizes: dict[str, Any] = {}
    if f"{case}.gate.bias_vl" in vectors:
        weights["gate.bias_vl"] = vectors.input(f"{case}.gate.bias_vl")
        sizes = _VISION
    for matrix in MATRICES:
        name = f"{case}.shared_experts.{matrix}"
        shared = vectors.input(f"{name}.weight")
        if f"{name}.scale" in vectors:
            shared = dequantize_fp8(shared, vectors.input(f"{name}.scale"), torch.float32)
        weights[f"shared_experts.{matrix}.weight"] = shared
    config = op_config(
        dim=x.shape[2],
        moe_inter_dim=weights["shared_experts.w1.weight"].shape[0],
        n_routed_experts=gate.shape[0],
        n_activated_experts=vectors.input(f"{case}.gate_idx").shape[1],
        score_func=described.score_func,
        swiglu_limit=described.swiglu_limit,
        route_scale=route_scale,
        **sizes,
    )
    module = ExpertModule(config, mode_compute(described.mode), weights, experts)
    mask = bits(vectors.input(f"{case}.image_mask"))
    _check_experts(vectors, case, runner.run(module, config, {"x": x, "image_mask": mask, **experts}), x.dtype)


_VISION: dict[str, Any] = {
    "vision_n_layers": 1,
    "vision_dim": 4,
    "vision_n_heads": 1,
    "vision_inter_dim": 1,
    "vision_patch_size": 1,
    "vision_rope_theta": 1.0,
    "vision_downsample_ratio": 1,
    "vision_max_n_token": 1,
    "image_token_id": 0,
}


def _expert_tensors(vectors: Vectors, case: str, num_experts: int) -> dict[str, Tensor]:
    """Stacked experts under the names stages bind them by; codes and scales viewed as int8."""
    stacked: dict[str, Tensor] = {}
    for matrix in MATRICES:
        parts = [vectors.input(f"{case}.experts.{expert}.{matrix}.weight") for expert in range(num_experts)]
        stacked[f"experts_{matrix}"] = torch.stack([_as_bytes(part) for part in parts])
    if f"{case}.experts.0.w1.scale" in vectors:
        for matrix in MATRICES:
            parts = [vectors.input(f"{case}.experts.{expert}.{matrix}.scale") for expert in range(num_experts)]
            stacked[f"experts_{matrix}_scale"] = torch.stack([_as_bytes(part) for part in parts])
    return stacked


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.int8) if values.element_size() == 1 else values


def _check_experts(vectors: Vectors, case: str, got: dict[str, Tensor], dtype: torch.dtype) -> None:
    for suffix in ("", "_img"):
        name, weight_name = f"{case}.gate_idx{suffix}", f"{case}.gate_w{suffix}"
        if name not in vectors or weight_name not in vectors:
            continue
        chosen, weights = sorted_by_index(got[f"gate_idx{suffix}"], got[f"gate_w{suffix}"])
        want, want_weights = sorted_by_index(vectors.input(name).to(torch.int64), vectors.input(weight_name))
        vectors.check(name, chosen, EXACT, "gate_idx", want=want)
        vectors.check(weight_name, weights, OPS_F32, "gate_w", want=want_weights)
    for name in ("expert0", "shared"):
        vectors.check(f"{case}.{name}", got[name], op_limit(dtype))
    for name in ("y", "y_img"):
        vectors.check(f"{case}.{name}", got[name], op_limit(dtype))
