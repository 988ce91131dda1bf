"""Messages between ranks: a header of integers, then the bytes of tensors whose names, dtypes and shapes both sides
work out for themselves. A header that does not say what its receiver expects is refused before a byte is taken."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import ClusterError
from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.runtime.distributed.payload import Bytes, DeviceBytes, LentBuffer, Payload, copy_tensor
from engram_trt.runtime.stage_runners.contract import Array, Buffer, View
from engram_trt.runtime.stage_runners.device_buffers import from_stored, stored_dtype, to_stored

MAGIC = 0x656E_6772_616D
VERSION = 1
HEADER_SLOTS = 24
_FIXED = 8
_ALIGNMENT = 64

Integers = npt.NDArray[np.int64]


class Op(IntEnum):
    """What a message asks of every rank it passes on its way around."""

    OPEN = 1
    """A session; numbers: its symbol limits."""
    STEP = 2
    """Numbers: the symbol sizes of the step."""
    CLOSE = 3
    """Forget a session."""
    SAVE = 4
    """Collect a row's caches; numbers: row, tokens."""
    LOAD = 5
    """Put a row's caches back; numbers: row, tokens."""
    RECORD = 6
    """Numbers: 1 to begin recording spans, 0 to end and publish them."""
    END = 7
    """Leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor of a message."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Layout:
    """Where the tensors of a message lie.

    Args:
        items: in order.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        self.offsets: list[int] = []
        end = 0
        for item in self.items:
            self.offsets.append(end)
            end += -(-item.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end
        text = repr([(item.key, item.dtype, item.shape) for item in self.items])
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def views(self, memory: Payload) -> dict[str, View]:
        """The tensors in a message's memory, by key."""
        return {
            item.key: _buffer(item.dtype, memory[offset : offset + item.num_bytes]).view(item.shape)
            for item, offset in zip(self.items, self.offsets, strict=True)
        }

    def pack(self, sources: Mapping[str, View], memory: Payload) -> None:
        """Copy tensors into a message; ValueError for one of another shape or dtype."""
        for key, view in self.views(memory).items():
            source = sources[key]
            if source.buffer.dtype != view.buffer.dtype:
                raise ValueError(f"{key}: {source.buffer.dtype} in place of {view.buffer.dtype}")
            copy_tensor(source, view)


class MessageBuffer(Buffer):
    """A tensor in the host memory of a message.

    Args:
        dtype: of the tensor.
        memory: exactly its bytes.
    """

    def __init__(self, dtype: str, memory: Bytes) -> None:
        self._stored = memory.view(stored_dtype(dtype))
        super().__init__(dtype, self._stored.size)

    @classmethod
    def holding(cls, dtype: str, values: Array) -> View:
        """A tensor of its own with a copy of some values."""
        buffer = cls(dtype, np.empty(values.size * ITEM_BYTES[dtype], dtype=np.uint8))
        buffer.write(values)
        return buffer.view(values.shape)

    def write(self, values: Array, offset: int = 0) -> None:
        stored = to_stored(self.dtype, values).reshape(-1)
        self._stored[offset : offset + stored.size] = stored

    def read(self, shape: tuple[int, ...]) -> Array:
        return from_stored(self.dtype, self._stored[: prod(shape)]).reshape(shape)


def _buffer(dtype: str, memory: Payload) -> Buffer:
    return LentBuffer(dtype, memory) if isinstance(memory, DeviceBytes) else MessageBuffer(dtype, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first part of a message.

    Args:
        op: what it asks.
        sequence: counts the messages of rank 0.
        chain: session it is about; 0 for none.
        layout: digest of the payload's layout; 0 without a payload.
        num_bytes: of the payload.
        numbers: what the op says.
    """

    op: Op
    sequence: int
    chain: int = 0
    layout: int = 0
    num_bytes: int = 0
    numbers: tuple[int, ...] = ()

    def to_array(self) -> Integers:
        """int64 [HEADER_SLOTS]."""
        fixed = (MAGIC, VERSION, self.op, self.sequence, self.chain, self.layout, self.num_bytes, len(self.numbers))
        array = np.zeros(HEADER_SLOTS, dtype=np.int64)
        array[: _FIXED + len(self.numbers)] = (*fixed, *self.numbers)
        return array

    @classmethod
    def from_array(cls, array: Integers) -> Header:
        """The inverse of `to_array`; ClusterError for anything else."""
        magic, version, op, sequence, chain, layout, num_bytes, count = (int(value) for value in array[:_FIXED])
        known = {int(member) for member in Op}
        if magic != MAGIC or version != VERSION or op not in known or not 0 <= count <= HEADER_SLOTS - _FIXED:
            raise refused(f"a header of {magic:#x}, version {version}, op {op}", f"{MAGIC:#x}, version {VERSION}")
        numbers = tuple(int(value) for value in array[_FIXED : _FIXED + count])
        return cls(op=Op(op), sequence=sequence, chain=chain, layout=layout, num_bytes=num_bytes, numbers=numbers)

    def require(self, layout: Layout) -> None:
        """ClusterError unless the payload has this layout."""
        if (self.layout, self.num_bytes) != (layout.digest, layout.num_bytes):
            keys = ", ".join(item.key for item in layout.items) or "nothing"
            raise refused(
                f"{self.op.name} with {self.num_bytes} bytes of another layout", f"{keys}: {layout.num_bytes}"
            )


def refused(found: str, expected: str) -> ClusterError:
    """The error for a message that is not what it should be."""
    return ClusterError(
        "a message from the rank before",
        found=found,
        expected=expected,
        remedy="All ranks must run the same version on the same artefact and deployment.",
    )
