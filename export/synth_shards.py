"""Shards of a synthetic checkpoint: the released split over files, and writing one at any offset."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from engram_trt.configs.inventory import TensorShape
from engram_trt.configs.safetensors_header import ITEM_BYTES
from engram_trt.export.synth_formats import ByteArray

_ALIGNMENT = 8


def tensor_bytes(shape: TensorShape) -> int:
    """Bytes of a tensor in its file."""
    return math.prod(shape.shape) * ITEM_BYTES[shape.dtype]


def shard_key(name: str) -> tuple[int, int]:
    """Sort key of the released split: vision; embedding; one file a layer; head; one a draft stage; one a table."""
    first, _, rest = name.partition(".")
    if first in ("vision", "aligner"):
        return 0, 0
    if first == "embed" or first.startswith("image_"):
        return 1, 0
    if first == "layers":
        layer_id, _, tail = rest.partition(".")
        return (5 if tail.startswith("engram.") else 2), int(layer_id)
    if first == "mtp":
        return 4, int(rest.partition(".")[0])
    return 3, 0


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def split_into_shards(tensors: Mapping[str, TensorShape]) -> dict[str, dict[str, TensorShape]]:
    """File name -> its tensors, in the order of their data: wider items first, so that all are aligned."""
    groups: dict[tuple[int, int], dict[str, TensorShape]] = {}
    for name, shape in tensors.items():
        groups.setdefault(shard_key(name), {})[name] = shape
    shards = {}
    for number, key in enumerate(sorted(groups), start=1):
        ordered = sorted(groups[key].items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
        shards[shard_name(number, len(groups))] = dict(ordered)
    return shards


class ShardWriter:
    """Writes one safetensors file: the header at once, then pieces of tensors in any order.

    What is never written reads as zeros and takes no room on file systems with sparse files.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorShape]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        self._offsets: dict[str, int] = {}
        for name, shape in tensors.items():
            end = position + tensor_bytes(shape)
            header[name] = {"dtype": shape.dtype, "shape": shape.shape, "data_offsets": [position, end]}
            self._offsets[name] = position
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data_start = 8 + len(text)
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data_start + position)

    def write(self, name: str, offset: int, data: ByteArray) -> None:
        """Write `data` at byte `offset` of tensor `name`."""
        self._file.seek(self._data_start + self._offsets[name] + offset)
        self._file.write(data.tobytes())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
