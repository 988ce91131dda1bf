"""`MoEExpertOutputs`: summed up it is `MoEExperts` bit by bit, however the experts are spread."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from expert_graphs import expert_model, moe_feed
from torch import Tensor

from engram_trt.plugins.moe_expert_outputs.spec import SPEC
from engram_trt.plugins.moe_experts import reference as whole
from engram_trt.plugins.moe_experts.spec import SPEC as WHOLE
from engram_trt.plugins.torch_ops import moe_expert_outputs as torch_op

EXPERTS, INTER, DIM = 7, 64, 96
PRODUCTS = {"swiglu_limit": 2.0, "activation_format": -1}
Tensors = dict[str, Any]
Op = Callable[[Tensors], Tensor]


def weights_of(feed: Tensors) -> Tensors:
    return {name: value for name, value in feed.items() if name.startswith("experts_")}


def spread(op: Op, feed: Tensors, ids: Tensor, weights: Tensor, shards: int) -> Tensor:
    """[rows, activated, dim] of all experts: each shard has a run of the experts and only the rows it is needed for."""
    found = torch.full((*ids.shape, feed["ffn_in"].shape[1]), torch.nan, dtype=feed["ffn_in"].dtype)
    bounds = [EXPERTS * shard // shards for shard in range(shards + 1)]
    for low, high in itertools.pairwise(bounds):
        is_here = (ids >= low) & (ids < high)
        rows = is_here.any(dim=1)
        part = op(
            {
                "ffn_in": feed["ffn_in"][rows],
                "expert_ids": torch.where(is_here, ids - low, -1)[rows].to(torch.int32),
                "expert_weights": torch.where(is_here, weights, torch.nan)[rows],
                **{name: value[low:high] for name, value in weights_of(feed).items()},
            }
        )
        assert not part[~is_here[rows]].any()
        found[is_here] = part[is_here[rows]]
    return found


def summed(outputs: Tensor, ids: Tensor) -> Tensor:
    """Sum over the slots of each row in ascending expert id, one after the other."""
    order = torch.argsort(ids, dim=1)
    total = torch.zeros(outputs.shape[0], outputs.shape[2])
    for slots in order.unbind(1):
        total = total + outputs[torch.arange(len(slots)), slots].to(torch.float32)
    return total


def as_tensors(feed: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> Tensors:
    tensors = {name: torch.from_numpy(value) for name, value in feed.items()}
    inexact = [name for name in tensors if name == "ffn_in" or tensors[name].dim() == 3]
    return tensors | {name: tensors[name].to(dtype) for name in inexact if tensors[name].is_floating_point()}


def run_reference(attributes: dict[str, Any]) -> Op:
    def op(tensors: Tensors) -> Tensor:
        values = [attributes[name] for name in SPEC.attribute_names]
        return torch_op.moe_expert_outputs(*(tensors.get(name) for name in SPEC.input_names), *values)

    return op


def run_session(model: onnx.ModelProto) -> Op:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def op(tensors: Tensors) -> Tensor:
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in tensors.items()})[0])

    return op


def routing_of(norm_topk_prob: int) -> dict[str, Any]:
    return {"n_activated_experts": 3, "norm_topk_prob": norm_topk_prob, "route_scale": 1.5}


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("format", [-1, 0, 1, 2])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_sums_to_moe_experts(dtype: torch.dtype, packed: bool, format: int, shards: int) -> None:
    attributes = {**PRODUCTS, "activation_format": format}
    feed = as_tensors(moe_feed(41, EXPERTS, INTER, DIM, packed=packed), dtype)
    ids, weights = whole.choose_experts(feed["scores"], feed["selection_bias"], **routing_of(1))
    outputs = spread(run_reference(attributes), feed, ids, weights, shards)
    assert outputs.dtype == dtype
    tensors = (feed.get(name) for name in WHOLE.input_names)
    expected = whole.moe_experts(*tensors, **routing_of(1), **attributes)  # type: ignore[arg-type]
    assert torch.equal(summed(outputs, ids), expected)


@pytest.mark.parametrize("rows", [1, 41])
@pytest.mark.parametrize("format", [-1, 0, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_function_sums_to_moe_experts(packed: bool, format: int, rows: int) -> None:
    """In ONNX Runtime; one graph serves any number of bound experts."""
    attributes = {**PRODUCTS, "activation_format": format}
    # Weights that are not divided by their sum have the same bits here and in the graph.
    routing = routing_of(0)
    feed = as_tensors(moe_feed(rows, EXPERTS, INTER, DIM, packed=packed))
    ids, weights = whole.choose_experts(feed["scores"], feed["selection_bias"], **routing)
    expected = run_session(expert_model(WHOLE, routing | attributes, packed=packed))(feed)
    op = run_session(expert_model(SPEC, attributes, packed=packed))
    for shards in (1, 2, 3):
        assert torch.equal(summed(spread(op, feed, ids, weights, shards), ids), expected), shards


def listed_tensors(packed: bool, dtype: torch.dtype = torch.float32) -> Tensors:
    """Rows of no, some and only present experts; an expert nobody asks for, and one asked for twice by a row."""
    feed = as_tensors(moe_feed(5, EXPERTS, INTER, DIM, packed=packed), dtype)
    ids = torch.tensor([[-1, 6, 2], [-1, -1, -1], [0, 3, 1], [4, -1, 4], [-1, -1, 2]], dtype=torch.int32)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    return {"ffn_in": feed["ffn_in"], "expert_ids": ids, "expert_weights": weights, **weights_of(feed)}


def one_by_one(tensors: Tensors, attributes: dict[str, Any]) -> Tensor:
    """Every (token, slot) on its own."""
    ids, dtype = tensors["expert_ids"], tensors["ffn_in"].dtype
    found = torch.zeros(*ids.shape, DIM, dtype=dtype)
    for row, slot in (ids >= 0).nonzero().tolist():
        matrices = []
        for name in ("experts_w1", "experts_w2", "experts_w3"):
            stored, scale = tensors[name][ids[row, slot]], tensors.get(f"{name}_scale")
            is_packed = scale is not None
            matrices.append((whole.dequantize_fp4(stored, scale[ids[row, slot]]) if is_packed else stored).to(dtype))
        weight = tensors["expert_weights"][row, slot].reshape(1, 1)
        found[row, slot] = whole.expert(tensors["ffn_in"][row : row + 1], *matrices, weight, **attributes)[0]
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"swiglu_limit": 0.0}, {"swiglu_limit": 0.3}, {"activation_format": 1}], ids=str
)
def test_each_slot_is_its_expert(changes: dict[str, Any], packed: bool) -> None:
    attributes = {**PRODUCTS, **changes}
    tensors = listed_tensors(packed)
    expected = one_by_one(tensors, attributes)
    model = expert_model(SPEC, attributes, packed=packed)
    onnx.checker.check_model(model, full_check=True)
    for op in (run_reference(attributes), run_session(model)):
        result = op(tensors)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert not result[tensors["expert_ids"] < 0].any()


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_to_do_gives_zeros(packed: bool) -> None:
    """No row, or rows without an expert here."""
    tensors = listed_tensors(packed)
    nobody = {**tensors, "expert_ids": torch.full_like(tensors["expert_ids"], -1)}
    no_row = {**tensors, **{name: tensors[name][:0] for name in ("ffn_in", "expert_ids", "expert_weights")}}
    for op in (run_reference(PRODUCTS), run_session(expert_model(SPEC, PRODUCTS, packed=packed))):
        assert torch.equal(op(nobody), torch.zeros(5, 3, DIM))
        assert op(no_row).shape == (0, 3, DIM)


def test_an_unbound_expert_is_refused() -> None:
    tensors = listed_tensors(packed=False)
    tensors["expert_ids"][2, 1] = EXPERTS
    with pytest.raises(IndexError):
        run_reference(PRODUCTS)(tensors)


@pytest.mark.parametrize("format", [-1, 0])
@pytest.mark.parametrize("packed", [True, False])
def test_bfloat16_function_is_valid(packed: bool, format: int) -> None:
    """No runtime on the CPU has bfloat16 products: types and shapes are checked, values are not."""
    model = expert_model(SPEC, {**PRODUCTS, "activation_format": format}, packed=packed, dtype="bfloat16")
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("packed", [True, False])
def test_torch_op_keeps_its_schema_and_fake(packed: bool) -> None:
    tensors = listed_tensors(packed, torch.bfloat16)
    arguments = [*(tensors.get(name) for name in SPEC.input_names), *PRODUCTS.values()]
    torch.library.opcheck(torch_op.moe_expert_outputs, arguments, test_utils=("test_schema", "test_faketensor"))
