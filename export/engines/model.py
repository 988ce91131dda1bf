"""A stage's ONNX file as TensorRT gets it: weights as inputs, nodes of ours that must become plugins."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from engram_trt.configs.artifact import WEIGHT_MARK
from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.plugins.spec import NAMESPACE, AttributeValue

PLUGIN_ATTRIBUTES = ("plugin_namespace", "plugin_version")

DTYPE_NAMES: Mapping[int, str] = {
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight:
    """A weight of a stage and where its values are.

    Args:
        name, dtype, shape: of the tensor.
        offset: in the stage's data file; None for a small tensor, whose bytes are `inline`.
        inline: bytes of a small tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    inline: bytes = b""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginNode:
    """A node of our domain in a stage's graph, also inside another node's body."""

    name: str
    op: str
    attributes: Mapping[str, AttributeValue]
    num_inputs: int
    outputs: tuple[str, ...]


def read_model(path: Path) -> onnx.ModelProto:
    """The graph of a stage file, external data not loaded; ArtifactError for a damaged file."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own classes differ between its implementations
        raise ArtifactError(
            str(path), found=f"no ONNX model ({error})", expected="a stage", remedy="Export the checkpoint again."
        ) from error


def dense_weights(model: onnx.ModelProto, path: Path, data: Path) -> tuple[DenseWeight, ...]:
    """The weights among a graph's initializers.

    Args:
        model: of a stage.
        path: its file, for messages.
        data: its data file, in the same folder.

    Raises:
        ArtifactError: a weight lies outside the data file, or the file is of an older export that marks none.
    """
    found = []
    for tensor in model.graph.initializer:
        if not any(item.key == WEIGHT_MARK for item in tensor.metadata_props):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise _damaged(path, f"an unmarked weight {tensor.name}", "weights marked as such")
            continue
        shape, dtype = tuple(tensor.dims), DTYPE_NAMES[tensor.data_type]
        weight = DenseWeight(name=tensor.name, dtype=dtype, shape=shape, offset=None, inline=tensor.raw_data)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            weight = _external(tensor, path, data, shape, dtype)
        elif len(tensor.raw_data) != weight.num_bytes:
            raise _damaged(path, f"{len(tensor.raw_data)} bytes for {tensor.name}", f"{weight.num_bytes}")
        found.append(weight)
    return tuple(found)


def _external(tensor: onnx.TensorProto, path: Path, data: Path, shape: tuple[int, ...], dtype: str) -> DenseWeight:
    place = {item.key: item.value for item in tensor.external_data}
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    try:
        offset, length = int(place["offset"]), int(place["length"])
    except (KeyError, ValueError):
        raise _damaged(path, f"no place for {tensor.name}", "an offset and a length") from None
    inside = place.get("location") == data.name and offset >= 0 and offset + length <= data.stat().st_size
    if not inside or length != num_bytes:
        raise _damaged(path, f"{tensor.name} at {place}", f"{num_bytes} bytes inside {data.name}")
    return DenseWeight(name=tensor.name, dtype=dtype, shape=shape, offset=offset)


def bind_weights(model: onnx.ModelProto, weights: tuple[DenseWeight, ...]) -> None:
    """Turn weights into graph inputs behind the stage's own; the graph is then the same for every layer of a kind."""
    types = {name: number for number, name in DTYPE_NAMES.items()}
    names = {weight.name for weight in weights}
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in names]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for weight in weights:
        value = helper.make_tensor_value_info(weight.name, types[weight.dtype], list(weight.shape))
        model.graph.input.append(value)
    model.graph.name = "stage"


def drop_bodies(model: onnx.ModelProto) -> None:
    """Take the function bodies away: a node that is no plugin then has nothing to fall back to."""
    del model.functions[:]


def plugin_nodes(model: onnx.ModelProto) -> tuple[PluginNode, ...]:
    """Nodes of our domain, subgraphs included."""
    return tuple(_plugin_node(node) for node in graph_nodes(model.graph) if node.domain == NAMESPACE)


def graph_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph and of the graphs inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graph_nodes(attribute.g)


def _plugin_node(node: onnx.NodeProto) -> PluginNode:
    attributes = {
        item.name: helper.get_attribute_value(item) for item in node.attribute if item.name not in PLUGIN_ATTRIBUTES
    }
    return PluginNode(
        name=node.name,
        op=node.op_type,
        attributes=attributes,
        num_inputs=len(node.input),
        outputs=tuple(node.output),
    )


def model_digest(model: onnx.ModelProto) -> str:
    """SHA-256 (hex) of a graph."""
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _damaged(path: Path, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        str(path), found=found, expected=expected, remedy="Export the checkpoint again with this version."
    )
