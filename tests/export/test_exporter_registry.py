"""One table of translations gives the graphs that a fresh table gives, and is put away afterwards."""

from __future__ import annotations

import torch
from torch import nn
from torch.onnx._internal.exporter import _registration

from engram_trt.export.exporter_registry import one_registry
from engram_trt.plugins.primitives import take


def exported() -> bytes:
    """A small graph with a translation of the caller's own, which must not stay in the table."""
    from engram_trt.plugins.onnx_translation import translation_table

    class Lookup(nn.Module):
        def forward(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return torch.softmax(take(table, ids), dim=-1)

    examples = (torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64))
    program = torch.onnx.export(
        Lookup(), examples, dynamo=True, custom_translation_table=translation_table(), verbose=False
    )
    assert program is not None
    return program.model_proto.SerializeToString()


def test_graphs_are_the_same_and_the_table_stays_clean() -> None:
    fresh, original = exported(), _registration.ONNXRegistry.from_torchlib
    with one_registry():
        before = _registration.ONNXRegistry.from_torchlib().functions
        assert exported() == exported() == fresh
        assert _registration.ONNXRegistry.from_torchlib().functions == before
        assert not [name for name in before if "engram" in str(name)]
    assert _registration.ONNXRegistry.from_torchlib == original
