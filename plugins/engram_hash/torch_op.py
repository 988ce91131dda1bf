"""`torch.ops.engram.engram_hash`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.engram_hash import reference
from engram_trt.plugins.engram_hash.spec import SPEC
from engram_trt.plugins.kernels.dispatch import launch_on_cuda


@torch.library.custom_op("engram::engram_hash", mutates_args=())
def engram_hash(
    compressed_ids: Tensor,
    token_history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """See `reference.engram_hash`."""
    if compressed_ids.is_cuda:
        tensors = (compressed_ids, token_history, multipliers, primes, offsets)
        return launch_on_cuda(SPEC, tensors, (pad_id,))[0]
    return reference.engram_hash(compressed_ids, token_history, multipliers, primes, offsets, pad_id)


@engram_hash.register_fake
def _(
    compressed_ids: Tensor,
    token_history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    return compressed_ids.new_empty(*compressed_ids.shape, *offsets.shape)
