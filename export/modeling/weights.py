"""From checkpoint tensors to module parameters and resident buffers; the only place that knows both names.

Parameter names are the checkpoint's without the layer prefix, so the adapter only dequantises, casts and stacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import TensorSpec
from engram_trt.plugins.float_tables import E4M3_TABLE, E8M0_TABLE
from engram_trt.plugins.moe_experts.reference import dequantize_fp4
from engram_trt.plugins.primitives import take

TILE = 32
"""Side of the square tile that shares one E8M0 scale in an FP8 matrix."""


CHUNK_ELEMENTS = 1 << 20
"""Values dequantised at a time; bounds the memory of an export."""


_ENGRAM_TENSORS = {"engram_rows": "weight", "engram_scales": "scale"}


class WeightSource(Protocol):
    """Where tensors come from: a checkpoint in the released layout, or a folder of golden vectors."""

    @property
    def config(self) -> ModelConfig:
        """The model the tensors belong to."""
        ...

    def has(self, name: str) -> bool:
        """Whether a tensor of this name exists."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; CheckpointError if there is none."""
        ...


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 values times the E8M0 scale of their 32 x 32 tile (spec 6.3); exact in bfloat16.

    Args:
        weight: [rows, columns] float8_e4m3fn.
        scale: [ceil(rows/32), ceil(columns/32)] float8_e8m0fnu.
        dtype: of the result.

    Returns:
        [rows, columns].
    """
    rows, columns = weight.shape
    values = take(E4M3_TABLE, weight.view(torch.uint8).to(torch.int32))
    factors = take(E8M0_TABLE, scale.view(torch.uint8).to(torch.int32))
    factors = factors.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return (values * factors).to(dtype)


def dense_chunks(source: WeightSource, name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """A parameter's values in pieces of its leading axis: dequantised if stored as FP8 or FP4, cast otherwise.

    Args:
        source: the checkpoint.
        name: of the tensor.
        shape: what the model needs.
        dtype: of the result.

    Raises:
        CheckpointError: absent, misshapen, or quantised without a scale.
    """
    stored = source.tensor(name)
    is_fp8, is_fp4 = stored.dtype == torch.float8_e4m3fn, stored.dtype in (torch.int8, torch.uint8)
    found = (*stored.shape[:-1], stored.shape[-1] * 2) if is_fp4 else tuple(stored.shape)
    if found != tuple(shape):
        raise CheckpointError(
            name,
            found=f"shape {list(found)}",
            expected=f"{list(shape)}",
            remedy="The checkpoint does not fit its config.json.",
        )
    if not is_fp8 and not is_fp4:
        yield from (part.to(dtype) for part in torch.split(stored, _rows_per_chunk(shape)))
        return
    scale = _scale_of(source, name, stored.dtype)
    rows = _rows_per_chunk(shape)
    for start in range(0, stored.shape[0], rows):
        part = stored[start : start + rows]
        if is_fp8:
            yield dequantize_fp8(part, scale[start // TILE : -(-(start + rows) // TILE)], dtype)
        else:
            yield dequantize_fp4(part.view(torch.int8), scale[start : start + rows].view(torch.int8)).to(dtype)


def _rows_per_chunk(shape: Sequence[int]) -> int:
    """Rows whose values fit a chunk, a multiple of the tile's side."""
    row = max(math.prod(shape[1:]), 1)
    return max(CHUNK_ELEMENTS // row // TILE, 1) * TILE


def _scale_of(source: WeightSource, name: str, dtype: torch.dtype) -> Tensor:
    scale_name = f"{name.removesuffix('.weight')}.scale"
    if not source.has(scale_name):
        raise CheckpointError(
            name,
            found=f"{dtype} values and no {scale_name}",
            expected="a scale beside every quantised weight",
            remedy="Download the checkpoint again.",
        )
    return source.tensor(scale_name)


def parameter_names(module: nn.Module, prefix: str, computed: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """(parameter name, checkpoint name) of every weight of a module that the checkpoint holds."""
    skipped = set(computed)
    for name, _ in module.named_parameters():
        if name not in skipped:
            yield name, f"{prefix}{name}"


@torch.no_grad()
def load_parameters(module: nn.Module, source: WeightSource, prefix: str, computed: Iterable[str] = ()) -> None:
    """Fill a module from a checkpoint.

    Args:
        module: parameters named as in the checkpoint, less `prefix`.
        source: the checkpoint.
        prefix: e.g. `layers.3.`.
        computed: parameters the module made itself.

    Raises:
        CheckpointError: a tensor is absent or of another shape.
    """
    for name, stored_name in parameter_names(module, prefix, computed):
        parameter = module.get_parameter(name)
        start = 0
        for chunk in dense_chunks(source, stored_name, parameter.shape, parameter.dtype):
            parameter[start : start + chunk.shape[0]] = chunk
            start += chunk.shape[0]


def resident_tensor_names(config: ModelConfig, tensor: TensorSpec) -> list[str]:
    """Checkpoint tensors that, in order, make up a resident input: one per expert, or one for a table.

    Args:
        config: the model.
        tensor: a resident input of a block, such as `experts_w1_scale` or `engram_rows`.
    """
    prefix = f"layers.{tensor.owner}."
    if tensor.tensor in _ENGRAM_TENSORS:
        return [f"{prefix}engram.embed.{_ENGRAM_TENSORS[tensor.tensor]}"]
    matrix, _, scale = tensor.tensor.removeprefix("experts_").partition("_")
    return [f"{prefix}ffn.experts.{expert}.{matrix}.{scale or 'weight'}" for expert in range(config.n_routed_experts)]


def resident_tensor(source: WeightSource, tensor: TensorSpec, dtype: torch.dtype) -> Tensor:
    """The values of a resident input, as a stage takes them.

    Args:
        source: the checkpoint.
        tensor: the input.
        dtype: of float experts; one-byte tensors (codes, scales, table rows) are viewed as int8.

    Returns:
        a table as it is mapped, experts stacked by id.
    """
    stored = [source.tensor(name) for name in resident_tensor_names(source.config, tensor)]
    stored = [item.view(torch.int8) if item.element_size() == 1 else item.to(dtype) for item in stored]
    return stored[0] if tensor.tensor in _ENGRAM_TENSORS else torch.stack(stored)


def experts_are_packed(source: WeightSource, layer_id: int) -> bool:
    """Whether a layer's routed experts are stored as FP4 codes."""
    return source.has(f"layers.{layer_id}.ffn.experts.0.w1.scale")
