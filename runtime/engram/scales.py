"""The one scale byte that no table may have: 255, which is not a number."""

from __future__ import annotations

import numpy as np

from engram_trt.configs.errors import CheckpointError
from engram_trt.runtime.engram.files import Bytes
from engram_trt.runtime.engram.tables import Ids, TableShape

SCALE_NAN = 255


def check_scales(shape: TableShape, ids: Ids, scales: Bytes) -> None:
    """Refuse scales that are not numbers.

    Args:
        shape: of their table.
        ids: [n], their rows.
        scales: [n, scale_bytes].

    Raises:
        CheckpointError: naming the first row and block.
    """
    if scales.max(initial=0) == SCALE_NAN:
        place, block = divmod(int(np.flatnonzero(scales == SCALE_NAN)[0]), shape.scale_bytes)
        raise scale_error(table_place(shape), int(ids[place]), block)


def table_place(shape: TableShape) -> str:
    """How an error names a table."""
    return f"Engram table of layer {shape.layer_id}"


def scale_error(where: str, row: int, block: int) -> CheckpointError:
    """The error for a scale that is not a number."""
    return CheckpointError(
        where,
        found=f"scale byte 255 (not a number) in row {row}, block {block}",
        expected="a power of two, bytes 0..254",
        remedy="The weights are damaged; fetch the shard again.",
    )
