"""Turn the weight inputs of a traced graph into initializers in an external data file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from engram_trt.configs.artifact import WEIGHT_MARK
from engram_trt.export.digested_writer import DigestedWriter
from engram_trt.export.passes.data_layout import INLINE_BYTES, padded

_DATA_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight of a stage.

    Args:
        shape, dtype: of the whole tensor.
        chunks: makes its values as consecutive pieces of its leading axis; called once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def externalize(
    model: onnx.ModelProto,
    weights: Mapping[str, StoredWeight],
    data_path: Path,
    *,
    zeros: bool,
    progress: Callable[[int], None],
) -> str:
    """Write the data file and replace the graph's weight inputs by initializers that point into it.

    Before: every weight is a graph input behind the stage's own. After: it is an initializer, and the graph's
    inputs are exactly the stage's. Weights go piece by piece from where they are stored into the file.

    Args:
        model: the traced graph; changed.
        weights: graph input name -> values, all of the graph's weights.
        data_path: written whole; lies in the folder the .onnx file will lie in.
        zeros: leave the tensors of the data file zero, as a sparse file of full size.
        progress: called with the number of bytes just written.

    Returns:
        SHA-256 (hex) of the data file.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: a weight is not an input of the graph.
    """
    with DigestedWriter(data_path) as file:
        for name, weight in weights.items():
            tensor = _initializer(model, name, weight)
            if weight.num_bytes <= INLINE_BYTES:
                tensor.raw_data = b"".join(_pieces(weight))
                continue
            _point_to(tensor, data_path.name, file.num_bytes, weight.num_bytes)
            end = file.num_bytes + padded(weight.num_bytes)
            for piece in () if zeros else _pieces(weight):
                file.write(piece)
                progress(len(piece))
            if zeros:
                progress(weight.num_bytes)
            file.skip(end - file.num_bytes)
        sha256 = file.finish()
    _drop_inputs(model, weights)
    return sha256


def point_to_data(model: onnx.ModelProto, weights: Mapping[str, StoredWeight], location: str) -> int:
    """`externalize` without a data file and without values: the same graph size, and the size the file would have.

    Args:
        model, weights: as there.
        location: name of the data file.
    """
    offset = 0
    for name, weight in weights.items():
        tensor = _initializer(model, name, weight)
        if weight.num_bytes <= INLINE_BYTES:
            tensor.raw_data = bytes(weight.num_bytes)
            continue
        _point_to(tensor, location, offset, weight.num_bytes)
        offset += padded(weight.num_bytes)
    _drop_inputs(model, weights)
    return offset


def _initializer(model: onnx.ModelProto, name: str, weight: StoredWeight) -> onnx.TensorProto:
    if name not in {value.name for value in model.graph.input}:
        raise ValueError(f"{name} is not an input of the traced graph")
    tensor = model.graph.initializer.add(name=name, dims=weight.shape, data_type=_DATA_TYPES[weight.dtype])
    tensor.metadata_props.add(key=WEIGHT_MARK, value=name)
    return tensor


def _drop_inputs(model: onnx.ModelProto, weights: Mapping[str, StoredWeight]) -> None:
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _pieces(weight: StoredWeight) -> Iterator[memoryview]:
    """The values as bytes; each piece is made anew, so that it may be digested while the next one is made."""
    for chunk in weight.chunks():
        values = chunk.to(weight.dtype).contiguous().reshape(-1).view(torch.uint8)
        yield values.numpy().data.cast("B")


def _point_to(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
