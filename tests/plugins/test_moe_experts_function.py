"""The hand-written body of `MoEExperts` under ONNX Runtime: against the reference, and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from engram_trt.plugins.moe_experts import reference
from engram_trt.plugins.moe_experts.onnx_op import function
from engram_trt.plugins.moe_experts.spec import SPEC
from engram_trt.plugins.onnx_exporter import OPSET
from engram_trt.plugins.onnx_functions import NodeVariant
from engram_trt.plugins.onnx_translation import PLUGIN_ATTRIBUTES
from engram_trt.plugins.quantize_dequantize import onnx_op as rounding
from engram_trt.plugins.quantize_dequantize.spec import SPEC as ROUNDING

TYPES = {"float32": onnx.TensorProto.FLOAT, "int8": onnx.TensorProto.INT8}


def moe_model(attributes: dict[str, float], *, packed: bool) -> onnx.ModelProto:
    """A graph of one `MoEExperts` node."""
    variant = NodeVariant(
        spec=SPEC, attributes=attributes, dtype="float32", num_inputs=len(SPEC.inputs) if packed else 6, sizes={}
    )
    functions = [function(variant, "")]
    if attributes["activation_format"] >= 0:
        inner = NodeVariant(spec=ROUNDING, attributes={"format": 0}, dtype="float32", num_inputs=1, sizes={})
        functions.append(rounding.function(inner, "0"))
    operands = variant.inputs
    plugin = dict(zip(PLUGIN_ATTRIBUTES, ("engram", "1"), strict=True))
    node = helper.make_node(
        SPEC.name, [o.name for o in operands], ["routed_output"], domain="engram", **attributes, **plugin
    )
    values = [
        helper.make_tensor_value_info(
            o.name, TYPES["int8" if packed and o.name.startswith("experts") else "float32"], list(map(str, o.shape))
        )
        for o in operands
    ]
    output = helper.make_tensor_value_info("routed_output", onnx.TensorProto.FLOAT, ["rows", "dim"])
    return helper.make_model(
        helper.make_graph([node], "moe", values, [output]),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("engram", 1)],
        functions=functions,
        ir_version=10,
    )


def moe_feed(rows: int, experts: int, inter: int, dim: int, *, packed: bool, seed: int = 0) -> dict[str, np.ndarray]:
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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu_limit": 0.0},
        {"swiglu_limit": 0.3},
        {"norm_topk_prob": 0},
        {"n_activated_experts": 1},
        {"n_activated_experts": 6},
        {"activation_format": 0},
    ],
    ids=str,
)
def test_body_is_the_reference(changes: dict[str, float], rows: int, packed: bool) -> None:
    attributes = {
        "n_activated_experts": 3,
        "norm_topk_prob": 1,
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "activation_format": -1,
        **changes,
    }
    model = moe_model(attributes, packed=packed)
    onnx.checker.check_model(model, full_check=True)
    feed = moe_feed(rows, 6, 64, 96, packed=packed)
    feed["scores"][:, 2] = feed["scores"][:, 4]  # a tie in scores, decided by the bias
    feed["selection_bias"][:, [1, 3]] = 0.0
    feed["scores"][:, 3] = feed["scores"][:, 1]  # a tie in both: the lower id wins
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = session.run(None, feed)[0]
    tensors = [torch.from_numpy(feed[o.name]) if o.name in feed else None for o in SPEC.inputs]
    theirs = reference.moe_experts(*tensors, *(attributes[name] for name in SPEC.attribute_names)).numpy()  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(np.abs(theirs).max()))


def test_vanishing_scores_are_divided_by_the_epsilon() -> None:
    """Scores far below 1e-20 give weights far below one; without the epsilon they would be normalised."""
    attributes = {
        "n_activated_experts": 2,
        "norm_topk_prob": 1,
        "route_scale": 1.0,
        "swiglu_limit": 0.0,
        "activation_format": -1,
    }
    feed = moe_feed(2, 4, 32, 32, packed=False)
    feed["scores"][:] = 1e-24
    session = onnxruntime.InferenceSession(
        moe_model(attributes, packed=False).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    assert np.abs(session.run(None, feed)[0]).max() < 1e-2


MEASURE = """
import json, pathlib, re, sys
import numpy as np, onnxruntime
sys.path.insert(0, sys.argv[1])
from test_moe_experts_function import moe_feed, moe_model
attributes = dict(n_activated_experts=6, norm_topk_prob=1, route_scale=1.5, swiglu_limit=10.0, activation_format=-1)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
model = moe_model(attributes, packed=True).SerializeToString()
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
session.run(None, moe_feed(2, 8, 64, 64, packed=True))
feed = moe_feed(2, 8, 1024, 2048, packed=True)
def status(field):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", text).group(1)) * 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
session.run(None, feed)
print(json.dumps(status("VmHWM") - before))
"""


def test_temporaries_stay_below_three_dequantised_experts() -> None:
    """Eight experts, all of them chosen by some row; measured in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    one_expert = 3 * 1024 * 2048 * 4
    grown = json.loads(result.stdout)
    assert 0 < grown < 3 * one_expert, f"{grown / one_expert:.2f} experts"
