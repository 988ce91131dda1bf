"""Values of the small float formats, and the ONNX numbers of dtypes.

Tables are made from the formats' definitions (OCP 8-bit and microscaling formats; spec 6.3), not by casting, so
that a decoder that reads them is independent of a library's casts. E4M3 here is the finite variant ("fn").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram_trt.plugins.spec import ONNX_BFLOAT16, ONNX_FLOAT

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 codes 0..7; codes 8..15 are their negatives."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
"""The dtypes a stage's tensors can have, by their name in a spec."""


def torch_dtype(onnx_data_type: int) -> torch.dtype:
    """The torch dtype of an ONNX data type number. Raises KeyError for one no stage uses."""
    return {ONNX_FLOAT: torch.float32, ONNX_BFLOAT16: torch.bfloat16}[onnx_data_type]


def onnx_data_type(dtype: torch.dtype) -> int:
    """The ONNX data type number of a stage's dtype."""
    return {torch.float32: ONNX_FLOAT, torch.bfloat16: ONNX_BFLOAT16}[dtype]


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


# Built once: 256 entries each. Small constants, so that a trace lifts them as they are.
E4M3_TABLE: Tensor = torch.tensor([_e4m3(byte) for byte in range(256)], dtype=torch.float32)
"""[256] float32: value of every E4M3 byte."""

E8M0_TABLE: Tensor = torch.tensor(
    [*(2.0 ** (byte - E8M0_BIAS) for byte in range(255)), float("nan")], dtype=torch.float32
)
"""[256] float32: 2^(byte-127); byte 255 is NaN."""

_E2M1_SIGNED = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))
E2M1_PAIR_TABLE: Tensor = torch.tensor(
    [(_E2M1_SIGNED[byte & 0xF], _E2M1_SIGNED[byte >> 4]) for byte in range(256)], dtype=torch.float32
)
"""[256, 2] float32: the two values of a packed FP4 byte, low nibble first."""

E2M1_TABLE: Tensor = torch.tensor(E2M1_VALUES, dtype=torch.float32)
"""[8] float32: magnitude of every FP4 code without its sign."""
