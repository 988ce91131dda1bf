"""The shortcuts through the exporter: same results, nothing left behind, and the long way where it is needed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes, _registration

from engram_trt.plugins.onnx_exporter import OPSET, fast_exporter
from engram_trt.plugins.onnx_translation import translation_table
from engram_trt.plugins.primitives import take


class Lookup(nn.Module):
    """Every op that is translated here, one of this project's own, and axes behind the reshaped ones."""

    def forward(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.softmax(take(table, ids), dim=-1).to(torch.float32)
        pairs = rows.unflatten(1, (-1, 2)).to(torch.float64).flatten(1, 2)
        return pairs.unflatten(-1, (2, 3)).flatten(0, 1).flatten(-2)


class Composite(nn.Module):
    """The operator `^` has no translation: only a decomposition makes it `bitwise_xor`, which has."""

    def forward(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return take(table, ids ^ 1)


def exported(module: nn.Module, examples: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    rows = torch.export.Dim("rows", min=1, max=1000)
    program = torch.onnx.export(
        module,
        examples,
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=(None, {0: rows}),
        custom_translation_table=translation_table(),
        verbose=False,
    )
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    return model


@pytest.mark.parametrize("module", [Lookup(), Composite()], ids=["translated", "decomposed"])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_a_graph_computes_is_what_torch_computes(module: nn.Module, rows: int) -> None:
    def inputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 6), torch.randint(0, 8, (count, 4))

    with fast_exporter():
        model = exported(module, inputs(3))
    onnx.checker.check_model(model, full_check=True)
    table, ids = inputs(rows)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, dict(zip(names, (table.numpy(), ids.numpy()), strict=True)))[0]
    np.testing.assert_allclose(found, module(table, ids).numpy(), rtol=1e-6)


def test_only_what_lacks_a_translation_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_trt.plugins import onnx_exporter

    decomposed, decompose = [], onnx_exporter._decompose
    monkeypatch.setattr(
        onnx_exporter, "_decompose", lambda program, registry: decomposed.append(1) or decompose(program, registry)
    )
    with fast_exporter():
        exported(Lookup(), (torch.randn(7, 6), torch.zeros((3, 4), dtype=torch.int64)))
        assert not decomposed
        exported(Composite(), (torch.randn(7, 6), torch.zeros((3, 4), dtype=torch.int64)))
    assert len(decomposed) == 1


def test_translations_of_one_export_do_not_reach_the_next() -> None:
    original = _registration.ONNXRegistry.from_torchlib, _fx_passes.decompose_with_registry
    with fast_exporter():
        before = dict(_registration.ONNXRegistry.from_torchlib(OPSET).functions)
        exported(Lookup(), (torch.randn(7, 6), torch.zeros((3, 4), dtype=torch.int64)))
        assert dict(_registration.ONNXRegistry.from_torchlib(OPSET).functions) == before
        assert not [name for name in before if "engram" in str(name)]
    assert (_registration.ONNXRegistry.from_torchlib, _fx_passes.decompose_with_registry) == original
