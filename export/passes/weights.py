"""Turn the weight inputs of a traced graph into initializers in an external data file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from engram_trt.configs.artifact import WEIGHT_MARK

ALIGNMENT = 4096
"""Offset of a large tensor in its data file: a page, so that it can be mapped as it is."""

INLINE_BYTES = 1024
"""Smaller tensors stay in the .onnx file."""

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
) -> None:
    """Write the data file and replace the graph's weight inputs by initializers that point into it.

    Before: every weight is a graph input behind the stage's own. After: it is an initializer, and the graph's
    inputs are exactly the stage's.

    Args:
        model: the traced graph; changed.
        weights: graph input name -> values, all of the graph's weights.
        data_path: written whole; lies in the folder the .onnx file will lie in.
        zeros: leave the tensors of the data file zero, as a sparse file of full size.
        progress: called with the number of bytes just written.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: a weight is not an input of the graph.
    """
    inputs = {value.name for value in model.graph.input}
    with data_path.open("wb") as file:
        for name, weight in weights.items():
            if name not in inputs:
                raise ValueError(f"{name} is not an input of the traced graph")
            tensor = model.graph.initializer.add(name=name, dims=weight.shape, data_type=_DATA_TYPES[weight.dtype])
            tensor.metadata_props.add(key=WEIGHT_MARK, value=name)
            if weight.num_bytes <= INLINE_BYTES:
                tensor.raw_data = b"".join(_pieces(weight))
                continue
            offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
            _point_to(tensor, data_path.name, offset, weight.num_bytes)
            file.seek(offset)
            if zeros:
                file.truncate(offset + weight.num_bytes)
                file.seek(offset + weight.num_bytes)
                progress(weight.num_bytes)
                continue
            for piece in _pieces(weight):
                file.write(piece)
                progress(len(piece))
        file.flush()
        os.fsync(file.fileno())
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _pieces(weight: StoredWeight) -> Iterator[bytes]:
    for chunk in weight.chunks():
        yield chunk.to(weight.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _point_to(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
