"""The contract of a custom operation: its tensors, attributes, aliases and tolerance, stated once.

The torch op, the ONNX schema and function, the kernel launcher and the TensorRT plugin of an op all derive
from its `PluginSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NAMESPACE = "engram"
"""ONNX domain, TensorRT plugin namespace and torch library of every custom op."""

AttributeValue = int | float

ONNX_FLOAT, ONNX_BFLOAT16 = 1, 16
"""ONNX numbers of the stage dtypes, where a dtype is an attribute."""

# Type variables an operand may name instead of a dtype: one choice per node.
TYPE_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "T": ("float32", "bfloat16"),  # the stage's dtype
    "W": ("int8", "float32", "bfloat16"),  # weights: packed codes, or the stage's dtype
    "C": ("float32", "bfloat16", "int64"),  # a cache's dtype
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One tensor of an op.

    Args:
        name: the tensor's name, the same in torch, ONNX and TensorRT.
        dtype: a dtype name, or a key of `TYPE_VARIABLES`.
        shape: symbolic or fixed extents.
        optional: trailing inputs may be absent from a node.
        meaning: what the values are.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    meaning: str
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A compile-time parameter of an op. Every attribute is required on every node."""

    name: str
    kind: Literal["int", "float"]
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted |difference| = atol + rtol * |reference|, in float32. Zero means exact."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """Everything other layers may know about an op.

    Args:
        name: op type, e.g. "SparseAttention".
        version: raised when the meaning of inputs, outputs or attributes changes.
        inputs: in node order; optional ones last.
        outputs: in node order.
        attributes: in the order of the torch op's arguments.
        aliases: output name -> input name whose buffer it updates in place.
        tolerance: of the float32 outputs against the reference.
        supported_sms: compute capabilities a kernel exists for; a listed one without a kernel is a fault.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[Attribute, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance(rtol=1e-5, atol=2e-6)
    version: str = "1"
    supported_sms: tuple[int, ...] = (89, 90, 100, 103, 120)

    def __post_init__(self) -> None:
        seen_optional = False
        for operand in self.inputs:
            if seen_optional and not operand.optional:
                raise ValueError(f"{self.name}: required input {operand.name} after an optional one")
            seen_optional = seen_optional or operand.optional
        names = {operand.name for operand in self.inputs}
        for output, source in self.aliases.items():
            if source not in names or output not in {operand.name for operand in self.outputs}:
                raise ValueError(f"{self.name}: alias {output} -> {source} names no operand")

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.outputs)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        return tuple(attribute.name for attribute in self.attributes)
