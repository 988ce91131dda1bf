"""`torch.ops.engram.engram_hash`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.engram_hash import reference


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
