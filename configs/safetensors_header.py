"""Safetensors headers from untrusted files: bounded, unambiguous, and consistent with the file's size.

The format is 8 bytes of little-endian header length, a JSON object, then the tensors' bytes. The reader accepts
only files whose tensors tile the data exactly: no overlap, no gap, nothing before, behind or outside it.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.file_identity import FileIdentity
from engram_trt.configs.json_file import parse_json_object

MAX_HEADER_BYTES = 64 << 20
MAX_ENTRIES = 500_000
_MAX_RANK = 8
_MAX_DIMENSION = 2**48
_MAX_TENSOR_BYTES = 2**62
_LENGTH_BYTES = 8
_REMEDY = "The file is damaged or was not written by a safetensors writer; fetch it again."

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor's bytes lie.

    Attributes:
        name: checkpoint name.
        shard: the file.
        dtype: safetensors dtype name.
        shape: as stored; FP4 codes are I8 with half the columns.
        offset: first byte, from the start of the file.
        nbytes: length.
    """

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A checked header.

    Attributes:
        path: the file.
        file_bytes: its size.
        digest: SHA-256 (hex) of the header text.
        metadata: the `__metadata__` strings.
        entries: tensors by name, in the order of their data.
        identity: of the file when it was read; None for a header that was parsed from memory.
    """

    path: Path
    file_bytes: int
    digest: str
    metadata: Mapping[str, str]
    entries: Mapping[str, TensorEntry]
    identity: FileIdentity | None = None


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: for a file that is unreadable, truncated, oversized, ambiguous or inconsistent.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Before opening: a named pipe would wait for a writer.
            raise _bad(path, found="no regular file", expected="a safetensors file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_LENGTH_BYTES)
            length = _header_length(path, head, status.st_size)
            text = file.read(length)
    except OSError as cause:
        raise _bad(path, found=f"a file that cannot be read ({cause.strerror})", expected="a shard") from None
    if len(text) != length:
        raise _bad(path, found=f"{len(text)} header bytes", expected=f"{length}")
    return parse_header(path, text, status.st_size, FileIdentity.of(status))


def parse_header(path: Path, text: bytes, file_bytes: int, identity: FileIdentity | None = None) -> ShardHeader:
    """Check the header text of a file of `file_bytes` bytes; see `read_header`."""
    document = parse_json_object(text, f"{path} (header)", CheckpointError)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, found="__metadata__ that is not a map of strings", expected="a map of strings")
    if len(document) > MAX_ENTRIES:
        raise _bad(path, found=f"{len(document):,} tensors", expected=f"at most {MAX_ENTRIES:,}")
    data_start = _LENGTH_BYTES + len(text)
    entries = [_entry(path, name, value, data_start) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_tiling(path, entries, data_start, file_bytes)
    return ShardHeader(
        path=path,
        file_bytes=file_bytes,
        digest=hashlib.sha256(text).hexdigest(),
        metadata=metadata,
        entries={entry.name: entry for entry in entries},
        identity=identity,
    )


def _bad(path: Path, *, found: str, expected: str, name: str = "", remedy: str = _REMEDY) -> CheckpointError:
    where = f"{path}: {name}" if name else str(path)
    return CheckpointError(where, found=found, expected=expected, remedy=remedy)


def _header_length(path: Path, head: bytes, file_bytes: int) -> int:
    if len(head) < _LENGTH_BYTES:
        raise _bad(path, found=f"{file_bytes} bytes", expected="a safetensors file")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise _bad(path, found=f"a header of {length:,} bytes", expected=f"at most {MAX_HEADER_BYTES:,}")
    if _LENGTH_BYTES + length > file_bytes:
        raise _bad(
            path,
            found=f"{file_bytes:,} bytes",
            expected=f"a header of {length:,} bytes",
            remedy="The file is truncated; fetch it again.",
        )
    return length


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    if not name or len(name) > 1024:
        raise _bad(path, found=f"a tensor name of {len(name)} characters", expected="1..1024")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, name=name, found="other fields", expected="dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _bad(path, name=name, found=f"dtype {str(dtype)[:40]!r}", expected=", ".join(ITEM_BYTES))
    if not _is_int_list(shape, _MAX_DIMENSION) or len(shape) > _MAX_RANK:
        raise _bad(path, name=name, found=f"shape {str(shape)[:80]}", expected="up to 8 sizes of at most 2^48")
    if not _is_int_list(offsets, _MAX_TENSOR_BYTES) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, name=name, found=f"data_offsets {str(offsets)[:80]}", expected="[begin, end]")
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes == 0:
        raise _bad(path, name=name, found=f"shape {shape}, no bytes", expected="at least one value")
    if nbytes != end - begin:
        raise _bad(path, name=name, found=f"{end - begin:,} bytes", expected=f"{nbytes:,} for {dtype} {shape}")
    return TensorEntry(name=name, shard=path, dtype=dtype, shape=tuple(shape), offset=data_start + begin, nbytes=nbytes)


def _is_int_list(value: Any, limit: int) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= limit for entry in value
    )


def _check_tiling(path: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    """The tensors must follow one another from the first data byte to the last byte of the file."""
    position = data_start
    for entry in entries:
        if entry.offset != position:
            what = "a gap before it" if entry.offset > position else "bytes shared with another tensor"
            raise _bad(path, name=entry.name, found=what, expected="tensors that follow one another")
        position += entry.nbytes
    if position > file_bytes:
        first = next(entry for entry in entries if entry.offset + entry.nbytes > file_bytes)
        raise _bad(
            path,
            found=f"{file_bytes:,} bytes, so that {first.name} is the first tensor past the end",
            expected=f"{position:,} bytes",
            remedy="The file is truncated, an incomplete download perhaps; fetch it again.",
        )
    if position < file_bytes:
        raise _bad(path, found=f"{file_bytes:,} bytes", expected=f"{position:,}, all of them in tensors")
