"""How a stage's data file is laid out; a plan computes its size from the shapes alone."""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT = 4096
"""Offset of a large tensor in its data file, and the file's own size: a page, so that it can be mapped as it is."""

INLINE_BYTES = 1024
"""Smaller tensors stay in the .onnx file."""


def padded(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def data_file_bytes(tensor_bytes: Iterable[int]) -> int:
    """Size of the data file for weights of these sizes."""
    return sum(padded(num_bytes) for num_bytes in tensor_bytes if num_bytes > INLINE_BYTES)
