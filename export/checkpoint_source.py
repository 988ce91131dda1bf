"""A checkpoint in the released layout as a source of torch tensors, mapped and given back page by page."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_trt.configs.checkpoint import ByteMap, Checkpoint
from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.shard_reading import opened_shard

_DTYPES: Mapping[str, torch.dtype] = {
    "I8": torch.int8,
    "U8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class _Lent:
    """The memory of an array that may only be read, shown as if it might be written to: torch warns of any other."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.__array_interface__ = {**values.__array_interface__, "data": (values.ctypes.data, False)}


def mapped_tensor(values: npt.NDArray[Any]) -> Tensor:
    """A tensor over an array mapped for reading.

    Nothing is mapped copy-on-write: the system refuses that for a table larger than its memory, and counts it as
    memory of the process. Whoever writes to the tensor ends with a fault, so that no weight changes unseen.
    """
    tensor: Tensor = torch.from_numpy(np.asarray(_Lent(values)))
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Tensors as stored, mapped and not copied. Scales are checked for NaN when they are read."""

    checkpoint: Checkpoint
    _maps: dict[Path, ByteMap] = field(default_factory=dict, repr=False)
    _checked: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("checkpoints hold little-endian values, which this machine cannot map")

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's model."""
        return self.checkpoint.config

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        try:
            self.checkpoint.entry(name)
        except CheckpointError:
            return False
        return True

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; treat it as read only.

        Raises:
            CheckpointError: absent, unreadable, of another dtype than a model has, or a scale that is NaN.
        """
        entry = self.checkpoint.entry(name)
        if name not in self._checked:
            self.checkpoint.check_scales(entry)
            self._checked.add(name)
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{entry.shard}: {name}",
                found=f"values of type {entry.dtype}",
                expected=", ".join(_DTYPES),
                remedy="Use a checkpoint in the released layout.",
            )
        values = self._map(name)[entry.offset : entry.offset + entry.nbytes]
        return mapped_tensor(values).view(_DTYPES[entry.dtype]).reshape(entry.shape)

    def _map(self, name: str) -> ByteMap:
        header = self.checkpoint.header(name)
        if header.path not in self._maps:
            with opened_shard(header) as file:
                self._maps[header.path] = np.memmap(file, dtype=np.uint8, mode="r", shape=(header.file_bytes,))
        return self._maps[header.path]

    def drop_pages(self) -> None:
        """Give back the memory of everything read so far; what is read again comes from the page cache."""
        for mapped in self._maps.values():
            mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
