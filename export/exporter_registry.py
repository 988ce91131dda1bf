"""One table of translations for many exports.

`torch.onnx.export` parses its several hundred translations anew at every call, which is half the time of exporting
a small graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.onnx._internal.exporter import _registration


@contextmanager
def one_registry() -> Iterator[None]:
    """Within the context, every export starts from a copy of one table per opset."""
    registry_class = _registration.ONNXRegistry
    build, built = registry_class.from_torchlib, {}

    def copy_of_built(*arguments: int, **named: int) -> _registration.ONNXRegistry:
        key = (arguments, tuple(named.items()))
        if key not in built:
            built[key] = build(*arguments, **named)
        registry = registry_class()
        registry._opset_version = built[key]._opset_version
        registry.functions = {target: list(metas) for target, metas in built[key].functions.items()}
        return registry

    with patch.object(registry_class, "from_torchlib", staticmethod(copy_of_built)):
        yield
