"""The launcher's own refusals, on CPU tensors: nothing here runs a kernel."""

from __future__ import annotations

import pytest
import torch

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.kernels.launcher import launch, launch_interpreted


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(KernelError, match="QuantizeDequantize: device: found cpu; expected cuda"):
        launch("QuantizeDequantize", {"x": torch.zeros(1, 32)}, {"format": 0})


def test_tensors_on_different_devices_are_refused() -> None:
    tensors = {
        "cache": torch.zeros(1, 4, 8),
        "update": torch.zeros(1, 2, 8, device="meta"),
        "write_positions": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(KernelError, match="CacheWrite: update device: found meta; expected cpu"):
        launch_interpreted("CacheWrite", tensors, {"mode": 0})


def test_misaligned_tables_are_refused() -> None:
    table = torch.zeros(2 * 64 + 8, dtype=torch.int8)
    shifted = table[8:].view(2, 64) if table.data_ptr() % 16 == 0 else table[:128].view(2, 64)
    tensors = {
        "engram_ids": torch.zeros(1, 1, 1, dtype=torch.int64),
        "engram_rows": shifted,
        "engram_scales": torch.zeros(2, 2, dtype=torch.int8),
    }
    with pytest.raises(KernelError, match="EngramGather: engram_rows address"):
        launch_interpreted("EngramGather", tensors, {"out_dtype": 16})


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    tensors = {
        "cache": torch.zeros(1, 8, 4).transpose(1, 2),
        "update": torch.zeros(1, 2, 8),
        "write_positions": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(KernelError, match="CacheWrite: cache strides"):
        launch_interpreted("CacheWrite", tensors, {"mode": 0})


def test_an_output_buffer_of_another_shape_is_refused() -> None:
    with pytest.raises(KernelError, match="QuantizeDequantize: y"):
        launch_interpreted("QuantizeDequantize", {"x": torch.zeros(2, 32)}, {"format": 0}, {"y": torch.zeros(1, 32)})
