"""Encoders of the checkpoint's number formats in NumPy: bf16, FP8 with tile scales, packed FP4 (spec 6.3).

Scales are the power of two at or above amax / (largest code), so that no value is clipped; rounding is to nearest,
ties to even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

GROUP = 32
_FP8_LARGEST, _FP8_FLOOR = 448.0, 1e-4
_FP4_LARGEST, _FP4_FLOOR = 6.0, 6 * 2.0**-126
# Half-way points between neighbouring E2M1 magnitudes 0 .5 1 1.5 2 3 4 6, and whether a tie goes up (to the even
# code).
_FP4_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def to_bf16(values: Float32Array) -> ByteArray:
    """Round finite float32 values to bf16; returns little-endian bytes, uint8 [2 * values.size]."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.frombuffer(rounded.tobytes(), dtype=np.uint8)


def to_f32(values: Float32Array) -> ByteArray:
    """Little-endian bytes of float32 values, uint8 [4 * values.size]."""
    return np.frombuffer(values.astype("<f4").tobytes(), dtype=np.uint8)


def scale_bytes(amax: Float32Array, largest: float, floor: float) -> ByteArray:
    """E8M0 bytes of the smallest power of two >= max(amax, floor) / largest, by the exponent bits."""
    ratio = np.maximum(amax, np.float32(floor)) * np.float32(1 / largest)
    bits = ratio.astype(np.float32).view(np.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    codes: ByteArray = np.maximum(exponent, 1).astype(np.uint8)
    return codes


def scale_values(codes: ByteArray) -> Float32Array:
    """float32 value 2^(byte - 127) of E8M0 bytes 1..254."""
    values: Float32Array = (codes.astype(np.uint32) << 23).view(np.float32)
    return values


def e4m3_codes(values: Float32Array) -> ByteArray:
    """E4M3 codes of values within +-448."""
    magnitude = np.abs(values)
    bits = np.ascontiguousarray(magnitude).view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.uint32)
    codes: ByteArray = np.where(magnitude < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    return codes | np.left_shift(np.signbit(values).astype(np.uint8), 7, dtype=np.uint8)


def e2m1_codes(values: Float32Array) -> ByteArray:
    """E2M1 codes 0..15 of values; magnitudes above 6 become 6."""
    magnitude = np.abs(values)
    codes = np.zeros(values.shape, dtype=np.uint8)
    for midpoint, tie_up in _FP4_MIDPOINTS:
        codes += magnitude >= midpoint if tie_up else magnitude > midpoint
    signs = np.signbit(values).astype(np.uint8)
    return codes | np.left_shift(signs, 3, dtype=np.uint8)


def quantize_fp8_tiles(values: Float32Array) -> tuple[ByteArray, ByteArray]:
    """Codes uint8 [rows, columns] and scales uint8 [ceil(rows/32), ceil(columns/32)] of 32 x 32 tiles."""
    rows, columns = values.shape
    padded: Float32Array = np.zeros((-rows % GROUP + rows, -columns % GROUP + columns), dtype=np.float32)
    padded[:rows, :columns] = values
    tiles = padded.reshape(padded.shape[0] // GROUP, GROUP, padded.shape[1] // GROUP, GROUP)
    scales = scale_bytes(np.abs(tiles).max(axis=(1, 3)), _FP8_LARGEST, _FP8_FLOOR)
    scaled: Float32Array = tiles / scale_values(scales)[:, None, :, None]
    codes = e4m3_codes(scaled.reshape(padded.shape))
    return np.ascontiguousarray(codes[:rows, :columns]), scales


def quantize_fp8_rows(values: Float32Array) -> tuple[ByteArray, ByteArray]:
    """Codes uint8 [rows, columns] and scales uint8 [rows, columns/32], one per 32 values of a row."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // GROUP, GROUP)
    scales = scale_bytes(np.abs(groups).max(axis=2), _FP8_LARGEST, _FP8_FLOOR)
    return e4m3_codes(groups / scale_values(scales)[:, :, None]).reshape(rows, columns), scales


def quantize_fp4_rows(values: Float32Array) -> tuple[ByteArray, ByteArray]:
    """Packed codes uint8 [rows, columns/2] (low nibble = even column) and scales uint8 [rows, columns/32]."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // GROUP, GROUP)
    scales = scale_bytes(np.abs(groups).max(axis=2), _FP4_LARGEST, _FP4_FLOOR)
    codes = e2m1_codes(groups / scale_values(scales)[:, :, None]).reshape(rows, columns)
    return codes[:, 0::2] | np.left_shift(codes[:, 1::2], 4, dtype=np.uint8), scales
