"""`torch.ops.engram.cache_write` while tracing, the in-place write otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.cache_write import reference
from engram_trt.plugins.cache_write.spec import SPEC
from engram_trt.plugins.kernels.dispatch import launch_on_cuda


@torch.library.custom_op("engram::cache_write", mutates_args=())
def functional_cache_write(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    """See `reference.cache_write`. The exporter drops mutated inputs, so the traced op returns a new tensor."""
    if cache.is_cuda:
        return launch_on_cuda(SPEC, (cache.clone(), update, write_positions), (mode,))[0]
    return reference.cache_write(cache, update, write_positions, mode)


@functional_cache_write.register_fake
def _(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    return torch.empty_like(cache)


def cache_write(cache: Tensor, update: Tensor, write_positions: Tensor, mode: int) -> Tensor:
    """Write a step's rows and return the cache (see `reference.cache_write_`).

    Eager mode updates the buffer in place and returns it, which is what the alias of the engines' node means;
    a trace gets the functional op.
    """
    if torch.compiler.is_compiling():
        return functional_cache_write(cache, update, write_positions, mode)
    if cache.is_cuda:
        return launch_on_cuda(SPEC, (cache, update, write_positions), (mode,))[0]
    return reference.cache_write_(cache, update, write_positions, mode)
