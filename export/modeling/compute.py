"""How the model is computed: dtype between ops and which roundings of the published model are reproduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.plugins.float_tables import TORCH_DTYPES
from engram_trt.plugins.quantize_dequantize.spec import FP8_E8M0_32

NO_FORMAT = -1
"""Activation format of a linear whose input is used as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Numerics of a stage.

    Args:
        dtype: storage and compute dtype between ops.
        activation_quantization: round the inputs of FP8 and FP4 linears as the published model does.
        cache_quantization: round window rows, compressed rows, index queries and keys likewise.
    """

    dtype: torch.dtype = torch.float32
    activation_quantization: bool = False
    cache_quantization: bool = False

    @classmethod
    def from_deployment(cls, deployment: DeploymentConfig) -> ComputeConfig:
        """The numerics an operator chose."""
        return cls(
            dtype=TORCH_DTYPES[deployment.dtype],
            activation_quantization=deployment.activation_quantization == "reference",
            cache_quantization=deployment.cache_quantization == "reference",
        )

    @property
    def activation_format(self) -> int:
        """`QuantizeDequantize` format in front of FP8 and FP4 linears, or `NO_FORMAT`."""
        return FP8_E8M0_32 if self.activation_quantization else NO_FORMAT
