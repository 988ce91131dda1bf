"""Reading from and writing to the residual streams (spec 4).

A sublayer's weights are computed from the streams before it, and its reading weights serve the *next* sublayer:
attention reads with what the layer before handed on, the experts read with attention's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def collapse(hidden_states: Tensor, pre_mix: Tensor) -> Tensor:
    """Weighted sum of the streams, in float32, cast once.

    Args:
        hidden_states: [batch, tokens, hc_mult, dim].
        pre_mix: [batch, tokens, hc_mult] float32.

    Returns:
        [batch, tokens, dim] in the streams' dtype.
    """
    mixed = torch.matmul(pre_mix.unsqueeze(2), hidden_states.to(torch.float32)).squeeze(2)
    return mixed.to(hidden_states.dtype)


def expand(output: Tensor, hidden_states: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: stream k gets post_k * output + sum_j comb[j, k] * stream j, in float32, cast once.

    Args:
        output: [batch, tokens, dim], what the sublayer computed.
        hidden_states: [batch, tokens, hc_mult, dim], the streams before it.
        post: [batch, tokens, hc_mult] float32.
        comb: [batch, tokens, hc_mult, hc_mult] float32, row = source.

    Returns:
        [batch, tokens, hc_mult, dim] in the streams' dtype.
    """
    carried = torch.matmul(comb.transpose(2, 3), hidden_states.to(torch.float32))
    written = post.unsqueeze(-1) * output.to(torch.float32).unsqueeze(2)
    return (written + carried).to(hidden_states.dtype)
