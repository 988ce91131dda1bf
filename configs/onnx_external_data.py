"""Where an .onnx file keeps its weights, read from the file's wire format and checked before a library follows it.

A model is untrusted input: a tensor in it may name any file. This reader walks the protocol buffer itself, needs no
ONNX package, and accepts external data only with known keys, in the one data file beside the model, inside that
file. Numbers are field numbers of `onnx.proto`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.json_file import read_bytes

MAX_MODEL_BYTES = 1 << 30
KEYS = frozenset({"location", "offset", "length"})
"""External-data keys that an export writes; any other is refused."""

_MAX_DEPTH = 32
_MAX_OFFSET = 2**62
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_ITEM_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 17: 8}
"""Bits of an item by `TensorProto.DataType`: the types that a tensor of a stage may have."""

_MODEL_PARTS: Mapping[int, str] = {7: "graph", 25: "function"}
_CHILDREN: Mapping[str, Mapping[int, str]] = {
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


class MalformedError(ValueError):
    """The bytes are no protocol buffer, or none of a model that this project writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTensor:
    """A tensor whose values lie in another file.

    Args:
        name: of the tensor.
        location: file name as written in the model.
        offset, length: of its bytes there.
    """

    name: str
    location: str
    offset: int
    length: int


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """All tensors of a serialized model whose values are outside it, subgraphs and functions included.

    Raises:
        MalformedError: no protocol buffer, a key that is not one of `KEYS`, a number that is none, or a length
            that is not that of the tensor's shape.
    """
    found: list[ExternalTensor] = []
    for number, kind, value in _fields(memoryview(model)):
        part = _MODEL_PARTS.get(number)
        if part is not None:
            _walk(part, _message(kind, value), found, 0)
        elif number == 20:
            raise MalformedError("training information in a model")
    return found


def check_external_data(model_path: Path, data_path: Path) -> list[ExternalTensor]:
    """Hold the external data of an .onnx file against its data file.

    Args:
        model_path: the .onnx file.
        data_path: the only file it may refer to, in the same folder.

    Raises:
        ArtifactError: naming the tensor that points elsewhere, or what is malformed.
    """
    try:
        tensors = external_tensors(read_bytes(model_path, ArtifactError, max_bytes=MAX_MODEL_BYTES))
        for tensor in tensors:
            _check_place(tensor, data_path)
    except MalformedError as error:
        raise ArtifactError(
            str(model_path),
            found=str(error),
            expected=f"weights inside {data_path.name}, as export writes them",
            remedy="Do not use this artefact; export the checkpoint again.",
        ) from None
    return tensors


def _check_place(tensor: ExternalTensor, data_path: Path) -> None:
    if tensor.location != data_path.name:
        raise MalformedError(f"{tensor.name} in {tensor.location[:200]!r}")
    size = data_path.stat().st_size
    if tensor.offset + tensor.length > size:
        end = tensor.offset + tensor.length
        raise MalformedError(f"{tensor.name} at {tensor.offset:,}..{end:,} of {size:,} bytes")


def _walk(kind: str, data: memoryview, found: list[ExternalTensor], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise MalformedError(f"graphs nested deeper than {_MAX_DEPTH}")
    children = _CHILDREN[kind]
    for number, wire, value in _fields(data):
        child = children.get(number)
        if child == "tensor":
            tensor = _tensor(_message(wire, value))
            if tensor is not None:
                found.append(tensor)
        elif child is not None:
            part = _message(wire, value)
            # Nodes are many and hold no weight as a rule: the key tells at once.
            if child != "node" or b"location" in bytes(part):
                _walk(child, part, found, depth + 1)


def _tensor(data: memoryview) -> ExternalTensor | None:
    name, data_type, is_external = "", 0, False
    dims: list[int] = []
    pairs: list[tuple[str, str]] = []
    for number, wire, value in _fields(data):
        if number == 1:
            dims += _packed(wire, value)
        elif number == 2:
            data_type = _number(wire, value)
        elif number == 8:
            name = _text(wire, value)
        elif number == 13:
            pairs.append(_pair(_message(wire, value)))
        elif number == 14:
            is_external = _number(wire, value) == 1
    if not is_external and not pairs:
        return None
    place = dict(pairs)
    if len(place) != len(pairs) or place.keys() != KEYS or not is_external:
        raise MalformedError(f"{name[:200]!r} with external data keys {sorted(key for key, _ in pairs)[:8]}")
    offset, length = _decimal(name, place["offset"]), _decimal(name, place["length"])
    if data_type not in _ITEM_BITS or any(dim < 0 for dim in dims):
        raise MalformedError(f"{name[:200]!r} of type {data_type} and shape {dims[:8]}")
    if length * 8 != math.prod(dims) * _ITEM_BITS[data_type]:
        raise MalformedError(f"{name[:200]!r} of shape {dims[:8]} in {length:,} bytes")
    return ExternalTensor(name=name, location=place["location"], offset=offset, length=length)


def _decimal(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19) or int(text) > _MAX_OFFSET:
        raise MalformedError(f"{name[:200]!r} at {text[:40]!r}")
    return int(text)


def _pair(data: memoryview) -> tuple[str, str]:
    parts = {1: "", 2: ""}
    for number, wire, value in _fields(data):
        if number in parts:
            parts[number] = _text(wire, value)
    return parts[1], parts[2]


# --- the wire format --------------------------------------------------------------------------------------


def _fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """(field number, wire type, value) of a message."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise MalformedError("bytes that are no protocol buffer")
        if length > end - position:
            raise MalformedError("a truncated protocol buffer")
        yield number, wire, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise MalformedError("a truncated protocol buffer")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
    raise MalformedError("a number of more than 64 bits")


def _message(wire: int, value: int | memoryview) -> memoryview:
    if wire != _BYTES or isinstance(value, int):
        raise MalformedError("a number where a message belongs")
    return value


def _text(wire: int, value: int | memoryview) -> str:
    try:
        return bytes(_message(wire, value)).decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedError("a text that is not UTF-8") from None


def _number(wire: int, value: int | memoryview) -> int:
    if wire != _VARINT or not isinstance(value, int):
        raise MalformedError("a message where a number belongs")
    return value - 2**64 if value >= 2**63 else value


def _packed(wire: int, value: int | memoryview) -> list[int]:
    """A repeated number, packed or not."""
    if wire == _VARINT:
        return [_number(wire, value)]
    data, position, numbers = _message(wire, value), 0, []
    while position < len(data):
        number, position = _varint(data, position)
        numbers.append(_number(_VARINT, number))
    return numbers
