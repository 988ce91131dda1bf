"""Kernels of `MoEExpertOutputs` under the interpreter: against the reference, and summed against `MoEExperts`.

Every buffer a kernel should write is filled with NaN or the largest integer beforehand.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from expert_graphs import expert_attributes, expert_tensors
from torch import Tensor

from engram_trt.plugins.moe_expert_outputs import reference as moe_expert_outputs
from engram_trt.plugins.moe_experts import reference as moe_experts

FLOAT_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def listed_tensors(tensors: dict[str, Tensor | None], ids: Tensor, weights: Tensor) -> dict[str, Tensor | None]:
    """Inputs of `MoEExpertOutputs` with the experts of `expert_tensors`; a weight that is not read is NaN."""
    bound = {name: tensor for name, tensor in tensors.items() if name.startswith("experts_")}
    routed = {"expert_ids": ids.to(torch.int32), "expert_weights": torch.where(ids < 0, math.nan, weights)}
    return {"ffn_in": tensors["ffn_in"], **routed, **bound}


@pytest.mark.parametrize(
    ("dtype", "packed", "format", "rows"),
    [
        (torch.float32, False, -1, 5),
        (torch.float32, True, 0, 7),
        (torch.float32, False, 2, 5),
        (torch.bfloat16, True, 0, 19),
        (torch.bfloat16, False, 1, 7),
        (torch.bfloat16, True, -1, 2),
    ],
)
def test_moe_expert_outputs(interpreter: Any, dtype: torch.dtype, packed: bool, format: int, rows: int) -> None:
    """Any slot may be empty; the last row is, and one expert has no token."""
    draw = torch.Generator().manual_seed(11)
    ids = torch.randint(-3, 8, (rows, 4), generator=draw).clamp(min=-1)
    ids[-1] = -1
    weights = torch.rand(rows, 4, generator=draw)
    tensors = listed_tensors(expert_tensors(dtype, packed, rows), ids, weights)
    attributes = {"swiglu_limit": 1.0, "activation_format": format}
    result = interpreter.run("MoEExpertOutputs", tensors, attributes)["expert_outputs"]
    expected = moe_expert_outputs.moe_expert_outputs(**tensors, **attributes)  # type: ignore[arg-type]
    assert result.dtype == dtype
    tolerance = FLOAT_TOLERANCE if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-3}
    torch.testing.assert_close(result, expected, **tolerance)
    assert not result[ids < 0].any()


@pytest.mark.parametrize(
    ("dtype", "packed", "format", "rows"),
    [(torch.bfloat16, True, 0, 5), (torch.bfloat16, False, -1, 19), (torch.float32, True, 2, 3)],
)
def test_moe_expert_outputs_sum_to_moe_experts(
    interpreter: Any, dtype: torch.dtype, packed: bool, format: int, rows: int
) -> None:
    """Bit by bit, with all experts here and with two runs of them on their own, each for the rows it is needed for."""
    tensors, attributes = expert_tensors(dtype, packed, rows), {**expert_attributes(format), "norm_topk_prob": 0}
    expected = interpreter.run("MoEExperts", tensors, attributes)["routed_output"]
    routing = {name: attributes[name] for name in ("n_activated_experts", "norm_topk_prob", "route_scale")}
    scores, bias, x = tensors["scores"], tensors["selection_bias"], tensors["ffn_in"]
    assert scores is not None
    assert bias is not None
    assert x is not None
    ids, weights = moe_experts.choose_experts(scores, bias, **routing)
    for bounds in ((0, 9), (0, 5, 9)):
        outputs = torch.full((*ids.shape, x.shape[1]), math.nan)
        for low, high in itertools.pairwise(bounds):
            here = (ids >= low) & (ids < high)
            needed = here.any(dim=1)
            bound = {name: None if t is None else t[low:high] for name, t in tensors.items() if name != "ffn_in"}
            listed = listed_tensors(
                {**bound, "ffn_in": x[needed]}, torch.where(here, ids - low, -1)[needed], weights[needed]
            )
            products = {name: attributes[name] for name in ("swiglu_limit", "activation_format")}
            part = interpreter.run("MoEExpertOutputs", listed, products)["expert_outputs"]
            outputs[here] = part[here[needed]].to(torch.float32)
        total = torch.zeros_like(expected)
        for slot in torch.argsort(ids, dim=1).unbind(1):
            total = total + outputs[torch.arange(len(slot)), slot]
        assert torch.equal(total, expected)


def test_moe_expert_outputs_of_an_unbound_expert_are_zero(interpreter: Any) -> None:
    """Kernels cannot raise: an id that no expert has reads and writes nothing."""
    tensors = expert_tensors(torch.float32, packed=False, rows=2)
    ids = torch.tensor([[9, 1], [-7, 511]])
    listed = listed_tensors(tensors, ids, torch.ones(2, 2))
    products = {"swiglu_limit": 1.0, "activation_format": -1}
    result = interpreter.run("MoEExpertOutputs", listed, products)["expert_outputs"]
    known = torch.tensor([[False, True], [False, False]])
    assert result[known].any()
    assert not result[~known].any()


def test_no_rows(interpreter: Any) -> None:
    tensors = expert_tensors(torch.float32, packed=False, rows=1)
    tensors["ffn_in"] = torch.zeros(0, 64)
    listed = listed_tensors(tensors, torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    attributes = {"swiglu_limit": 0.0, "activation_format": -1}
    outputs = interpreter.run("MoEExpertOutputs", listed, attributes)["expert_outputs"]
    assert outputs.shape == (0, 3, 64)
