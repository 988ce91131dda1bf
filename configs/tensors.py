"""Tensors and stages described once: ONNX axes, TensorRT profiles, buffers and comparisons derive from these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

Role = Literal["step", "activation", "state", "resident"]
"""Who fills a tensor: the session before every step; an earlier stage; a stage, kept between steps; the
checkpoint, bound once."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
}

EXPERTS = "experts"
"""Kind of a stage that is the routed experts of a layer, and the symbol for how many of them are bound."""

Shape = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a stage.

    Args:
        name: binding name, unique among a stage's inputs and outputs.
        dtype: a key of `ITEM_BYTES`.
        shape: fixed extents, or symbols whose limits the deployment sets (see `symbol_limits`).
        role: who fills it.
        tensor: the tensor the binding stands for, if the binding needs another name (`hidden_states_out` is
            the next stage's `hidden_states`). Defaults to `name`.
        owner: layer the tensor belongs to; None for one that exists once.
        alias: on an output, the input whose buffer it updates in place.
    """

    name: str
    dtype: str
    shape: Shape
    role: Role
    tensor: str = ""
    owner: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype} is not one a stage can carry")
        if not self.tensor:
            object.__setattr__(self, "tensor", self.name)

    @property
    def key(self) -> str:
        """Name of the tensor across all stages."""
        return self.tensor if self.owner is None else f"layers.{self.owner}.{self.tensor}"

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape with every symbol replaced; KeyError names a symbol without a size."""
        return tuple(sizes[extent] if isinstance(extent, str) else extent for extent in self.shape)

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the tensor at the given sizes."""
        return math.prod(self.resolve(sizes)) * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a manifest."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "role": self.role,
            "tensor": self.tensor,
            "owner": self.owner,
            "alias": self.alias,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TensorSpec:
        """The inverse of `to_json`; TypeError, KeyError or ValueError on anything else."""
        shape = document["shape"]
        if not isinstance(shape, list) or not all(type(extent) in (int, str) for extent in shape):
            raise TypeError(f"the shape {str(shape)[:80]}")
        texts = [document[key] for key in ("name", "dtype", "role", "tensor")]
        if not all(isinstance(text, str) for text in texts) or document["role"] not in get_args(Role):
            raise TypeError(f"a tensor {str(texts)[:80]}")
        if type(document["owner"]) not in (int, NoneType) or type(document["alias"]) not in (str, NoneType):
            raise TypeError(f"owner or alias of {document['name']}")
        return cls(**{**document, "shape": tuple(shape)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage of the chain.

    Args:
        name: `engram_hash`, `embedding`, `block_NN` or `head`.
        kind: stages of one kind share one graph and differ in weights only.
        layer_id: of a block.
        inputs, outputs: in binding order.
    """

    name: str
    kind: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layer_id: int | None = None

    def __post_init__(self) -> None:
        names = [spec.name for spec in (*self.inputs, *self.outputs)]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"{self.name}: bindings named twice: {sorted(repeated)}")
        inputs = {spec.name: spec for spec in self.inputs}
        for output in self.outputs:
            if output.alias is None:
                continue
            source = inputs.get(output.alias)
            if source is None or (source.shape, source.dtype) != (output.shape, output.dtype):
                raise ValueError(f"{self.name}: {output.name} cannot update {output.alias} in place")

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    def input(self, name: str) -> TensorSpec:
        """The input bound under `name`; KeyError if there is none."""
        return {spec.name: spec for spec in self.inputs}[name]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a manifest."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layer_id": self.layer_id,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageSpec:
        """The inverse of `to_json`; TypeError, KeyError or ValueError on anything else."""
        if not isinstance(document["name"], str) or not isinstance(document["kind"], str):
            raise TypeError("a stage without a name")
        if type(document["layer_id"]) not in (int, NoneType):
            raise TypeError(f"the layer_id of {document['name']}")
        return cls(
            name=document["name"],
            kind=document["kind"],
            layer_id=document["layer_id"],
            inputs=tuple(TensorSpec.from_json(item) for item in document["inputs"]),
            outputs=tuple(TensorSpec.from_json(item) for item in document["outputs"]),
        )
