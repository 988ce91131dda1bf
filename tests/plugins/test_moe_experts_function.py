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
from expert_graphs import expert_model, moe_feed

from engram_trt.plugins.moe_experts import reference
from engram_trt.plugins.moe_experts.spec import SPEC


def moe_model(attributes: dict[str, float], *, packed: bool) -> onnx.ModelProto:
    return expert_model(SPEC, attributes, packed=packed)


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
from expert_graphs import expert_model, moe_feed
from engram_trt.plugins.moe_experts.spec import SPEC
attributes = dict(n_activated_experts=6, norm_topk_prob=1, route_scale=1.5, swiglu_limit=10.0, activation_format=-1)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
model = expert_model(SPEC, attributes, packed=True).SerializeToString()
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
        [sys.executable, "-c", MEASURE, str(Path(__file__).parents[1] / "helpers")],
        capture_output=True,
        text=True,
        check=True,
    )
    one_expert = 3 * 1024 * 2048 * 4
    grown = json.loads(result.stdout)
    assert 0 < grown < 3 * one_expert, f"{grown / one_expert:.2f} experts"
