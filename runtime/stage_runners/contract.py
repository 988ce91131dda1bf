"""What the runtime asks of a back end: buffers it can read and write, and stages that run on them.

A stage is bound to its buffers once per shape and then only run, so that a step costs no Python beyond one call
per stage. State tensors are updated in place: the input and the output of a state are the same view.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.tensors import StageSpec

Array = npt.NDArray[Any]
Run = Callable[[], None]
ResidentArrays = Callable[[StageSpec, str], Array]
"""(stage, resident input) -> its weights."""


class Buffer(ABC):
    """Memory of one tensor at its largest size, on the back end's device."""

    def __init__(self, dtype: str, num_elements: int) -> None:
        self.dtype, self.num_elements = dtype, num_elements

    def view(self, shape: tuple[int, ...]) -> View:
        """The first elements of the buffer as a tensor of `shape`."""
        if math.prod(shape) > self.num_elements:
            raise ValueError(f"a view of {shape} is larger than its buffer of {self.num_elements} elements")
        return View(buffer=self, shape=shape)

    @abstractmethod
    def write(self, values: Array, offset: int = 0) -> None:
        """Copy host values (flattened) into the buffer from element `offset` on."""

    @abstractmethod
    def read(self, shape: tuple[int, ...]) -> Array:
        """A host array of the first elements; it may share memory with the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A buffer seen as a dense tensor."""

    buffer: Buffer
    shape: tuple[int, ...]

    def write(self, values: Array) -> None:
        """Copy host values of exactly this shape."""
        if values.shape != self.shape:
            raise ValueError(f"writing {values.shape} to a tensor of {self.shape}")
        self.buffer.write(values)

    def read(self) -> Array:
        """Host array of this shape; it may share memory with the buffer."""
        return self.buffer.read(self.shape)


class StageRunner(ABC):
    """One stage, ready to be bound."""

    spec: StageSpec

    @abstractmethod
    def bind(self, views: Mapping[str, View]) -> Run:
        """Fix the stage to these tensors.

        Args:
            views: binding name -> view, for every input and output of the spec; a state's output has the view
                of its input.

        Returns:
            a function that runs the stage once.
        """


class Backend(ABC):
    """A way to run stages: ONNX Runtime, the eager modules, TensorRT."""

    name: str

    @abstractmethod
    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        """A zero-filled buffer; BackendError if the dtype cannot be held."""

    @abstractmethod
    def load(self, spec: StageSpec) -> StageRunner:
        """Open a stage."""

    @abstractmethod
    def resident(self, spec: StageSpec, binding: str) -> View:
        """The weights bound to a resident input; stages that share a tensor get the same view."""

    def transfer(self, source: View, target: View) -> Run:
        """What brings a tensor of another back end into one of this one; through host memory, unless a back end
        knows a shorter way."""

        def copy() -> None:
            target.write(source.read())

        return copy

    def close(self) -> None:  # noqa: B027 - most back ends hold nothing that needs closing
        """Release what the back end holds."""


NUMPY_DTYPES: Mapping[str, type[np.generic]] = {
    "bool": np.bool_,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
}
"""Dtypes numpy itself has; bfloat16 is not among them."""
