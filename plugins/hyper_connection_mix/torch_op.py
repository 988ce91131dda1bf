"""`torch.ops.engram.hyper_connection_mix`: the reference, opaque to a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_trt.plugins.hyper_connection_mix import reference
from engram_trt.plugins.hyper_connection_mix.spec import SPEC
from engram_trt.plugins.kernels.dispatch import launch_on_cuda


@torch.library.custom_op("engram::hyper_connection_mix", mutates_args=())
def hyper_connection_mix(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.hyper_connection_mix`."""
    if hidden_states.is_cuda:
        tensors = (hidden_states, hc_fn, hc_scale, hc_base)
        pre, post, comb = launch_on_cuda(SPEC, tensors, (hc_sinkhorn_iters, hc_eps, norm_eps))
        return pre, post, comb
    return reference.hyper_connection_mix(hidden_states, hc_fn, hc_scale, hc_base, hc_sinkhorn_iters, hc_eps, norm_eps)


@hyper_connection_mix.register_fake
def _(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, n, _ = hidden_states.shape
    return (
        hc_base.new_empty(batch, tokens, n),
        hc_base.new_empty(batch, tokens, n),
        hc_base.new_empty(batch, tokens, n, n),
    )
