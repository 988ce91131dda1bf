"""The values of an eager stage at the points an exported stage can be compared at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engram_trt.export.accuracy.divergence.reference_ops import TORCH_NAMES
from engram_trt.export.modeling.compute import NO_FORMAT
from engram_trt.export.modeling.layers import Linear, RMSNorm
from engram_trt.runtime.stage_runners.contract import Array

Point = tuple[str, str, int]
"""(label as in `stage_graph.Anchor`, `input` or `output`, index among the node's)."""


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes inputs and outputs of the package's ops."""

    def __init__(self, points: dict[Point, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._points = points
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        op_type = TORCH_NAMES.get(name) if func.namespace == "engram" else None
        if op_type is None:
            return func(*args, **(kwargs or {}))
        count = self.counts[op_type] = self.counts.get(op_type, -1) + 1
        label = f"{op_type}#{count}" if count else op_type
        self._note(label, "input", args)
        results = func(*args, **(kwargs or {}))
        self._note(label, "output", results if isinstance(results, tuple | list) else (results,))
        return results

    def _note(self, label: str, side: str, values: Any) -> None:
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self._points[label, side, index] = value.detach().clone()


@contextmanager
def _module_hooks(module: nn.Module, points: dict[Point, Tensor]) -> Iterator[None]:
    """Notes input and output of linears and norms."""

    def hook(label: str) -> Any:
        def note(item: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # A linear that rounds its input does so inside; the graph's product sees the rounded one.
            if getattr(item, "activation_format", NO_FORMAT) == NO_FORMAT:
                points.setdefault((label, "input", 0), inputs[0].detach().clone())
            points.setdefault((label, "output", 0), output.detach().clone())

        return note

    handles = [
        item.register_forward_hook(hook(name))
        for name, item in module.named_modules()
        if isinstance(item, Linear | RMSNorm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def eager_points(
    module: nn.Module, tensors: dict[str, Tensor], outputs: tuple[str, ...]
) -> tuple[Mapping[Point, Array], Mapping[str, Array]]:
    """Run a stage's module.

    Args:
        module: of the stage.
        tensors: its inputs; changed in place.
        outputs: names of its outputs.

    Returns:
        values by point, and the stage's outputs by name.
    """
    points: dict[Point, Tensor] = {}
    with _module_hooks(module, points), _OpRecorder(points):
        results = module(tensors, outputs)
    named = dict(zip(outputs, results, strict=True))
    return {key: _array(value) for key, value in points.items()}, {key: _array(v) for key, v in named.items()}


def _array(value: Tensor) -> Array:
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
