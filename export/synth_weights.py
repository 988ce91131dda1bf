"""Random weights of a synthetic checkpoint, tensor by tensor and in bounded memory.

Every tensor draws from a generator of its own, seeded by (seed, name): a partial checkpoint holds the same bytes as
a whole one. Standard deviations keep activations of order one in any depth and width: linears 1/sqrt(inputs), so
that queries, routing logits, index scores and Engram gates are spread, not saturated; the head 2/sqrt(dim), so
that logits behind the final norm have a standard deviation near 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from engram_trt.configs.inventory import TensorShape
from engram_trt.export.synth_formats import (
    GROUP,
    ByteArray,
    Float32Array,
    quantize_fp4_rows,
    quantize_fp8_rows,
    quantize_fp8_tiles,
    to_bf16,
    to_f32,
)

# One piece of a tensor: its name, where the piece begins within the tensor, and its bytes.
Piece = tuple[str, int, ByteArray]
Quantizer = Callable[[Float32Array], tuple[ByteArray, ByteArray]]

_CHUNK_VALUES = 1 << 22
# FP4 and table rows above this many values are put together from a pool of quantised groups, which is some
# twenty times quicker than drawing and quantising billions of values.
_POOL_THRESHOLD = 1 << 21
_POOL_GROUPS = 1 << 16

# Mean and deviation by the end of the name; anything else is a linear.
_VECTORS: dict[str, tuple[float, float]] = {
    "norm.weight": (1.0, 0.1),
    "norm1.weight": (1.0, 0.1),
    "norm2.weight": (1.0, 0.1),
    "engram.q_weight": (1.0, 0.1),
    "engram.k_weight": (1.0, 0.1),
    "attn_sink": (0.0, 1.0),
    "gate.bias": (0.0, 0.05),
    "gate.bias_vl": (0.0, 0.05),
    "embed.weight": (0.0, 1.0),
    "image_start": (0.0, 1.0),
    "image_end": (0.0, 1.0),
    "image_newline": (0.0, 1.0),
    "hc_attn_base": (0.0, 0.5),
    "hc_ffn_base": (0.0, 0.5),
    "hc_attn_scale": (1.0, 0.1),
    "hc_ffn_scale": (1.0, 0.1),
    ".bias": (0.0, 0.02),
}
_LOGIT_STD = 2.0


def tensor_generator(seed: int, name: str) -> np.random.Generator:
    """The generator of one tensor; it depends on nothing but the two arguments."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest[:16], dtype="<u4").tolist()])


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Of a tensor's values before they are rounded to its format."""
    for ending, moments in _VECTORS.items():
        if name.endswith(ending) or (ending == "norm.weight" and name.endswith("_norm.weight")):
            return moments
    fan_in = math.sqrt(shape[-1])
    return 0.0, (_LOGIT_STD if name == "head.weight" else 1.0) / fan_in


def tensor_pieces(
    name: str, shape: TensorShape, scale: TensorShape | None, seed: int, *, is_table: bool
) -> Iterator[Piece]:
    """Draw one tensor, with its scales where it has them.

    Args:
        name: checkpoint name of the tensor (not of its scale).
        shape: its format and shape.
        scale: the same of `X.scale` for `X.weight`, or None for a tensor without.
        seed: of the checkpoint.
        is_table: rows are scaled each on their own (an Engram table), not in tiles.

    Yields:
        pieces of the tensor and of its scale, in any order, none above a few MiB.
    """
    generator = tensor_generator(seed, name)
    mean, std = mean_and_std(name, shape.shape)
    if scale is None:
        yield from _float_pieces(name, shape, generator, mean, std)
        return
    rows, columns = shape.shape[0], shape.shape[1] * (2 if shape.dtype == "I8" else 1)
    if shape.dtype != "I8" and not is_table:
        yield from _drawn_pieces(name, (rows, columns), generator, std, quantize_fp8_tiles, GROUP)
        return
    if not is_table:
        std = 1.0 / math.sqrt(columns)
    if rows * columns <= _POOL_THRESHOLD:
        quantizer = quantize_fp8_rows if is_table else quantize_fp4_rows
        yield from _drawn_pieces(name, (rows, columns), generator, std, quantizer, 1)
    else:
        yield from _pooled_pieces(name, (rows, columns), generator, _pool(is_table, std))


def _float_pieces(
    name: str, shape: TensorShape, generator: np.random.Generator, mean: float, std: float
) -> Iterator[Piece]:
    encode = to_bf16 if shape.dtype == "BF16" else to_f32
    size, offset = math.prod(shape.shape), 0
    for start in range(0, size, _CHUNK_VALUES):
        values = _normal(generator, (min(_CHUNK_VALUES, size - start),), std) + np.float32(mean)
        data = encode(values)
        yield name, offset, data
        offset += data.size


def _normal(generator: np.random.Generator, shape: tuple[int, ...], std: float) -> Float32Array:
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _row_chunks(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    step = max(_CHUNK_VALUES // columns // multiple, 1) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _drawn_pieces(
    name: str,
    size: tuple[int, int],
    generator: np.random.Generator,
    std: float,
    quantizer: Quantizer,
    multiple: int,
) -> Iterator[Piece]:
    code_offset = scale_offset = 0
    for start, stop in _row_chunks(*size, multiple):
        codes, scales = quantizer(_normal(generator, (stop - start, size[1]), std))
        yield name, code_offset, codes.reshape(-1)
        yield _scale_name(name), scale_offset, scales.reshape(-1)
        code_offset += codes.size
        scale_offset += scales.size


@lru_cache(maxsize=8)
def _pool(is_table: bool, std: float) -> tuple[ByteArray, ByteArray]:
    """Quantised groups of 32 values: codes uint8 [groups, bytes a group], scales uint8 [groups]."""
    generator = tensor_generator(0, f"pool {is_table} {std}")
    values = _normal(generator, (_POOL_GROUPS, GROUP), std)
    codes, scales = quantize_fp8_rows(values) if is_table else quantize_fp4_rows(values)
    return codes, scales.reshape(-1)


def _pooled_pieces(
    name: str, size: tuple[int, int], generator: np.random.Generator, pool: tuple[ByteArray, ByteArray]
) -> Iterator[Piece]:
    codes, scales = pool
    code_offset = scale_offset = 0
    for start, stop in _row_chunks(*size, 1):
        picks = generator.integers(0, _POOL_GROUPS, size=(stop - start) * size[1] // GROUP, dtype=np.int32)
        yield name, code_offset, codes[picks].reshape(-1)
        yield _scale_name(name), scale_offset, scales[picks]
        code_offset += picks.size * codes.shape[1]
        scale_offset += picks.size
