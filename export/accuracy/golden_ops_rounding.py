"""Vectors of rounding: the three small float formats, and linears over rounded inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.export.accuracy.golden_ops_basic import Meta, runs_on
from engram_trt.export.accuracy.golden_results import Vectors
from engram_trt.export.accuracy.golden_runner import OpModule, Runner, fill, op_config
from engram_trt.export.accuracy.golden_tolerance import EXACT, LINEAR_BF16, OPS_F32
from engram_trt.export.modeling.layers import Linear
from engram_trt.export.modeling.weights import dequantize_fp8
from engram_trt.plugins.float_tables import E2M1_MAX, E2M1_PAIR_TABLE, E4M3_MAX, E4M3_TABLE, E8M0_TABLE
from engram_trt.plugins.moe_experts.reference import dequantize_fp4
from engram_trt.plugins.quantize_dequantize import reference as rounding
from engram_trt.plugins.quantize_dequantize.spec import (
    FP4_E4M3_16,
    FP4_E8M0_32,
    FP8_E8M0_32,
    GROUP_OF_FORMAT,
)
from engram_trt.plugins.quantize_dequantize.torch_op import quantize_dequantize

FORMATS = {"fp8": FP8_E8M0_32, "fp4_32": FP4_E8M0_32, "fp4_16": FP4_E4M3_16}
"""Part of a tensor's name -> format."""


class Rounding(OpModule):
    """The op `QuantizeDequantize`, with the scale and the codes' values it goes through."""

    results = ("qdq", "scale", "values")

    def __init__(self, format: int, width: int) -> None:
        super().__init__()
        self.format, self.settings = format, (format,)
        self.symbols = {"x": ("tokens", width)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, format = inputs["x"], self.format
        groups = x.to(torch.float32).reshape(x.shape[0], -1, GROUP_OF_FORMAT[format])
        scale = rounding.group_scale(groups, format)
        is_fp8 = format == FP8_E8M0_32
        limit, round_to = (E4M3_MAX, rounding.round_to_e4m3) if is_fp8 else (E2M1_MAX, rounding.round_to_e2m1)
        values = round_to((groups / scale).clamp(-limit, limit)).flatten(-2)
        return {"qdq": quantize_dequantize(x, format), "scale": scale.squeeze(-1), "values": values}


def compare_quant(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    """Codes and scales are compared by value, through decode tables that are compared themselves."""
    e2m1 = E2M1_PAIR_TABLE[:16, 0]
    for name, table in {"e4m3_decode": E4M3_TABLE, "e8m0_decode": E8M0_TABLE, "e2m1_decode": e2m1}.items():
        vectors.check(name, table, EXACT, "decode tables")
    for case in sorted({name.split(".")[0] for name in vectors.names if name.endswith(".x")}):
        x = vectors.input(f"{case}.x")
        if not runs_on(runner, vectors, f"{case}.", x):
            continue
        for kind, format in FORMATS.items():
            if not any(name.startswith(f"{case}.{kind}.") for name in vectors.names):
                continue
            got = runner.run(Rounding(format, x.shape[1]), op_config(), {"x": x})
            vectors.check(f"{case}.{kind}.qdq", got["qdq"], EXACT)
            for name, got_value, want in (
                (f"{case}.{kind}.q", got["values"], _decoded(vectors, f"{case}.{kind}.q", E4M3_TABLE)),
                (f"{case}.{kind}.q_packed", got["values"], _decoded(vectors, f"{case}.{kind}.q_packed", None)),
                (f"{case}.{kind}.scale_e8m0", got["scale"], _decoded(vectors, f"{case}.{kind}.scale_e8m0", E8M0_TABLE)),
                (f"{case}.{kind}.scale_e4m3", got["scale"], _decoded(vectors, f"{case}.{kind}.scale_e4m3", E4M3_TABLE)),
            ):
                if want is not None:
                    vectors.check(name, got_value, EXACT, "codes and scales", want=want)


def _decoded(vectors: Vectors, name: str, table: Tensor | None) -> Tensor | None:
    """Values of stored codes; pairs of FP4 codes if there is no table."""
    if name not in vectors:
        return None
    codes = vectors.input(name).to(torch.int64)
    return E2M1_PAIR_TABLE[codes].flatten(-2) if table is None else table[codes]


class QuantizedLinear(OpModule):
    """A linear whose input is rounded to FP8 first."""

    results = ("y",)

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.linear = Linear(columns, rows, dtype, FP8_E8M0_32)
        fill(self.linear, {"weight": weight})
        self.symbols = {"x": ("batch", "tokens", columns)}

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.linear(inputs["x"])}


def compare_quant_linear(vectors: Vectors, runner: Runner, meta: Meta) -> None:
    for case in vectors.prefixes():
        x = vectors.input(f"{case}.x")
        for kind in ("fp8", "fp4"):
            if f"{case}.{kind}.scale" not in vectors:
                continue
            scale = vectors.input(f"{case}.{kind}.scale")
            if kind == "fp8":
                weight = dequantize_fp8(vectors.input(f"{case}.fp8.w"), scale, torch.float32)
            else:
                weight = dequantize_fp4(vectors.input(f"{case}.fp4.w_packed"), scale)
            vectors.check(f"{case}.{kind}.w_deq", weight, EXACT)
            y = runner.run(QuantizedLinear(weight, torch.float32), op_config(), {"x": x.to(torch.float32)})["y"]
            vectors.check(f"{case}.{kind}.y_f32_q", y, OPS_F32)
            if runs_on(runner, vectors, f"{case}.{kind}.y_bf16_q", x):
                y = runner.run(QuantizedLinear(weight, torch.bfloat16), op_config(), {"x": x})["y"]
                vectors.check(f"{case}.{kind}.y_bf16_q", y, LINEAR_BF16)
    sources = [name for name in vectors.names if name.endswith(".w_src")]
    vectors.skip(sources, "weights before their quantisation, which is not the model's work", "*.w_src")
