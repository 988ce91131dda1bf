"""Graphs of one node with experts, and inputs for graphs and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor

from engram_trt.plugins.onnx_bodies import FUNCTION_MAKERS
from engram_trt.plugins.onnx_exporter import OPSET
from engram_trt.plugins.onnx_functions import NodeVariant
from engram_trt.plugins.onnx_translation import PLUGIN_ATTRIBUTES
from engram_trt.plugins.quantize_dequantize.spec import SPEC as ROUNDING
from engram_trt.plugins.spec import PluginSpec

TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "int32": onnx.TensorProto.INT32,
}


def expert_model(
    spec: PluginSpec, attributes: dict[str, Any], *, packed: bool, dtype: str = "float32"
) -> onnx.ModelProto:
    """A graph of one node; every extent is dynamic."""
    optional = sum(operand.optional for operand in spec.inputs)
    num_inputs = len(spec.inputs) - (0 if packed else optional)
    variant = NodeVariant(spec=spec, attributes=attributes, dtype=dtype, num_inputs=num_inputs, sizes={})
    functions = [FUNCTION_MAKERS[spec.name](variant, "")]
    format = attributes["activation_format"]
    if format >= 0:
        inner = NodeVariant(spec=ROUNDING, attributes={"format": format}, dtype=dtype, num_inputs=1, sizes={})
        functions.append(FUNCTION_MAKERS[ROUNDING.name](inner, str(format)))
    meaning = {"T": dtype, "W": "int8" if packed else dtype}

    def value(operand: Any) -> onnx.ValueInfoProto:
        kind = TYPES[meaning.get(operand.dtype, operand.dtype)]
        return helper.make_tensor_value_info(operand.name, kind, list(map(str, operand.shape)))

    names = [operand.name for operand in variant.inputs]
    plugin = dict(zip(PLUGIN_ATTRIBUTES, ("engram", "1"), strict=True))
    node = helper.make_node(
        spec.name, names, list(spec.output_names), "experts", domain="engram", **attributes, **plugin
    )
    inputs, outputs = map(value, variant.inputs), map(value, spec.outputs)
    return helper.make_model(
        helper.make_graph([node], "experts", list(inputs), list(outputs)),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("engram", 1)],
        functions=functions,
        ir_version=10,
    )


def moe_feed(rows: int, experts: int, inter: int, dim: int, *, packed: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of `MoEExperts` in float32."""
    random = np.random.default_rng(seed)
    feed = {
        "ffn_in": random.standard_normal((rows, dim)).astype(np.float32),
        "scores": random.random((rows, experts)).astype(np.float32),
        "selection_bias": np.tile(random.standard_normal(experts).astype(np.float32) * 0.1, (rows, 1)),
    }
    shapes = {"experts_w1": (inter, dim), "experts_w2": (dim, inter), "experts_w3": (inter, dim)}
    for name, (outputs, inputs) in shapes.items():
        if packed:
            feed[name] = random.integers(-128, 128, (experts, outputs, inputs // 2), dtype=np.int8)
            feed[f"{name}_scale"] = random.integers(118, 124, (experts, outputs, inputs // 32), dtype=np.int8)
        else:
            feed[name] = (random.standard_normal((experts, outputs, inputs)) / inputs**0.5).astype(np.float32)
    return feed


def expert_tensors(dtype: torch.dtype, packed: bool, rows: int) -> dict[str, Tensor | None]:
    """Random inputs of `MoEExperts`; in the last row all scores tie."""
    draw, (experts, dim, inter) = torch.Generator().manual_seed(9), (9, 64, 96)
    scores = torch.rand(rows, experts, generator=draw)
    bias = torch.randn(rows, experts, generator=draw)
    scores[-1], bias[-1] = 0.5, 0  # all tie: the lower ids win
    tensors: dict[str, Tensor | None] = {
        "ffn_in": torch.randn(rows, dim, generator=draw).to(dtype),
        "scores": scores,
        "selection_bias": bias,
    }
    for name, shape in (("w1", (inter, dim)), ("w2", (dim, inter)), ("w3", (inter, dim))):
        if packed:
            codes = torch.randint(-128, 128, (experts, shape[0], shape[1] // 2), generator=draw)
            scale = torch.randint(118, 126, (experts, shape[0], shape[1] // 32), generator=draw)
            tensors[f"experts_{name}"] = codes.to(torch.int8)
            tensors[f"experts_{name}_scale"] = scale.to(torch.int8)
        else:
            tensors[f"experts_{name}"] = (torch.randn(experts, *shape, generator=draw) * 0.2).to(dtype)
            tensors[f"experts_{name}_scale"] = None
    return tensors


def expert_attributes(format: int) -> dict[str, Any]:
    """Attributes of `MoEExperts`."""
    return {
        "n_activated_experts": 3,
        "norm_topk_prob": 1,
        "route_scale": 1.5,
        "swiglu_limit": 1.0,
        "activation_format": format,
    }
