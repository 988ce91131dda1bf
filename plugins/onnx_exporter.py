"""`torch.onnx.export` as this project uses it: without its chatter, and without work whose result is known.

Two shortcuts, both into private parts of the pinned torch, neither of which changes a graph:

* The several hundred translations are parsed once a process and copied per export, not parsed at every export.
* Decomposing a program means to trace it a second time, which is more than half of an export. It is left out where
  every torch op of the program has a translation; the few that torch would only rename are translated here.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import onnxscript
import torch
from torch.onnx._internal.exporter import _decomp, _fx_passes, _registration

OPSET = 24
"""Asserted on everything that is exported: 23 brought RMSNormalization, 24 TensorScatter."""

STANDARD = onnxscript.values.Opset("", OPSET)

_TALKATIVE_LOGGERS = ("torch.onnx._internal.exporter._registration", "onnx_ir.serde")
_aten = torch.ops.aten
_ASSERTIONS = (_aten._assert_tensor_metadata.default, _aten._assert_scalar.default)
"""Dropped by the exporter itself, later."""


@contextmanager
def fast_exporter() -> Iterator[None]:
    """Within the context, `torch.onnx.export` is quiet and takes both shortcuts."""
    with (
        _quiet(),
        patch.object(_registration.ONNXRegistry, "from_torchlib", staticmethod(_copied_registry)),
        patch.object(_fx_passes, "decompose_with_registry", _decompose_if_needed),
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence about packages this project does not use, axes that share a name, and types filled in later."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_build_registry = functools.cache(_registration.ONNXRegistry.from_torchlib)


def _copied_registry(opset_version: int) -> _registration.ONNXRegistry:
    """A registry of its own for one export, which adds its custom translations to it."""
    built = _build_registry(opset_version)
    registry = _registration.ONNXRegistry()
    registry._opset_version = built._opset_version
    registry.functions = {target: list(metas) for target, metas in built.functions.items()}
    return registry


_decompose = _fx_passes.decompose_with_registry


def _decompose_if_needed(
    program: torch.export.ExportedProgram, registry: _registration.ONNXRegistry
) -> torch.export.ExportedProgram:
    translated = {*_decomp.get_onnx_implemented_overloads(registry), *_ASSERTIONS}
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return program if targets <= translated else _decompose(program, registry)


def _cast(x: Any, dtype: int) -> Any:
    return STANDARD.Cast(x, to=dtype)


def _to_dtype(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None) -> Any:
    return _cast(x, dtype)


def _to_dtype_layout(
    x: Any,
    dtype: int,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Any:
    return _cast(x, dtype)


def _reshape(x: Any, start: int, sizes: list[int], end: int) -> Any:
    """Axes start..end-1 become `sizes`. A size of 0 copies the axis of that place, so those before stay as they are."""
    behind = [int(extent) for extent in x.shape[end:]]
    return STANDARD.Reshape(x, STANDARD.Constant(value_ints=[0] * start + sizes + behind))


def _unflatten(x: Any, dim: int, sizes: list[int]) -> Any:
    axis = dim % len(x.shape)
    return _reshape(x, axis, [int(size) for size in sizes], axis + 1)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    rank = len(x.shape)
    return _reshape(x, start_dim % rank, [-1], end_dim % rank + 1)


RENAMING_TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    _aten.to.dtype: _to_dtype,
    _aten.to.dtype_layout: _to_dtype_layout,
    _aten.unflatten.int: _unflatten,
    _aten.flatten.using_ints: _flatten,
}
"""Torch ops that a decomposition would turn into one other op; the axes behind a reshaped one are fixed."""
