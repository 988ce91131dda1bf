"""Trace a stage into an ONNX graph whose weights are still inputs.

Nothing is allocated: every example tensor is fake, so a stage with a 98 GB table traces like a small one. With
weights as inputs the exporter cannot fold, transpose or rename them, and one trace serves every layer of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.passes.cleanup import drop_unused_outputs
from engram_trt.plugins.float_tables import TORCH_DTYPES
from engram_trt.plugins.onnx_exporter import OPSET, fast_exporter
from engram_trt.plugins.onnx_translation import registered_schemas, translation_table

EXAMPLE_SIZES = {
    "batch": 3,
    "tokens": 5,
    "selected": 7,
    "window_ring": 601,
    "state_ring": 607,
    "entries_r1": 613,
    "entries_r2": 617,
    "visible_r1": 619,
    "visible_r2": 631,
    "table_rows": 641,
    "experts": 643,
}
"""Extents during a trace: different primes, so that no two symbols are taken for one another or for a constant."""


class _StageFunction(nn.Module):
    """A stage as a function of its inputs and its weights."""

    def __init__(self, module: nn.Module, spec: StageSpec, weight_names: tuple[str, ...]) -> None:
        super().__init__()
        self.stage = [module]  # in a list: a submodule's own parameters would be lifted beside the inputs
        self.spec, self.weight_names = spec, weight_names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        num_inputs = len(self.spec.inputs)
        inputs = dict(zip(self.spec.input_names, tensors[:num_inputs], strict=True))
        weights = dict(zip(self.weight_names, tensors[num_inputs:], strict=True))
        arguments = (inputs, self.spec.output_names)
        results: tuple[Tensor, ...] = torch.func.functional_call(self.stage[0], weights, arguments)
        return results


def weight_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a stage's module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def trace_stage(spec: StageSpec, module: nn.Module) -> onnx.ModelProto:
    """The stage's graph; graph inputs are the spec's inputs, then the weights under the module's names.

    Args:
        spec: names, shapes and symbols.
        module: the stage's module; its weights' values are not looked at.

    Raises:
        RuntimeError: the exporter wrote another opset than asked for, or renamed an input.
    """
    weights = weight_tensors(module)
    names = (*spec.input_names, *weights)
    dims = {symbol: torch.export.Dim(symbol, min=1, max=2**31 - 2) for symbol in EXAMPLE_SIZES}
    shapes = [_dynamic_axes(tensor, dims) for tensor in spec.inputs] + [None] * len(weights)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        examples = [torch.empty(t.resolve(EXAMPLE_SIZES), dtype=TORCH_DTYPES[t.dtype]) for t in spec.inputs]
        examples += [torch.empty(weight.shape, dtype=weight.dtype) for weight in weights.values()]
    function = _StageFunction(module, spec, tuple(weights)).eval()
    with registered_schemas(), fast_exporter(), torch.no_grad():
        program = torch.onnx.export(
            function,
            tuple(examples),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(names),
            output_names=list(spec.output_names),
            dynamic_shapes=(tuple(shapes),),
            custom_translation_table=translation_table(),
            verbose=False,
        )
        if program is None:
            raise RuntimeError(f"{spec.name}: the exporter returned nothing")
        model: onnx.ModelProto = program.model_proto
    drop_unused_outputs(model)
    _check_trace(model, names, spec)
    return model


def _dynamic_axes(tensor: TensorSpec, dims: Mapping[str, object]) -> dict[int, object] | None:
    axes = {axis: dims[extent] for axis, extent in enumerate(tensor.shape) if isinstance(extent, str)}
    return axes or None


def _check_trace(model: onnx.ModelProto, names: tuple[str, ...], spec: StageSpec) -> None:
    opsets = {item.domain: item.version for item in model.opset_import}
    if opsets.get("") != OPSET:
        raise RuntimeError(f"{spec.name}: asked for opset {OPSET}, the exporter wrote {opsets.get('')}")
    found = tuple(value.name for value in model.graph.input)
    if found != names:
        raise RuntimeError(f"{spec.name}: traced inputs {found} are not {names}")
    outputs = tuple(value.name for value in model.graph.output)
    if outputs != spec.output_names:
        raise RuntimeError(f"{spec.name}: traced outputs {outputs} are not {spec.output_names}")
