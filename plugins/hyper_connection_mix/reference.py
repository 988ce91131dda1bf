"""Reference of `HyperConnectionMix`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Alternate row and column normalisation of exp(logits), ending with the columns (spec 4).

    Sums are products with constant 0/1 matrices: sum-add-divide chains make TensorRT's builder exponential, and
    a product with a bias is one node where a sum and an addition are two.

    Args:
        logits: [tokens, n, n], row = source stream.
        iterations: column normalisations; the first row step is a softmax.
        eps: added to every entry once and to each divisor.

    Returns:
        [tokens, n, n].
    """
    n = logits.shape[-1]
    cell = torch.arange(n * n, device=logits.device)
    row, column = cell // n, cell % n
    row_sums = (row.unsqueeze(1) == row).to(torch.float32)
    column_sums = (column.unsqueeze(1) == column).to(torch.float32)
    offset = torch.full((n * n,), eps, device=logits.device)
    matrix = (torch.softmax(logits, dim=-1) + offset.reshape(n, n)).reshape(-1, n * n)
    matrix = matrix / torch.addmm(offset, matrix, column_sums)
    for _ in range(iterations - 1):
        matrix = matrix / torch.addmm(offset, matrix, row_sums)
        matrix = matrix / torch.addmm(offset, matrix, column_sums)
    return matrix.reshape(-1, n, n)


def split_mixes(
    mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, hc_sinkhorn_iters: int, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb from the projected numbers.

    Args:
        mixes: [tokens, (2+n)*n] float32.
        hc_scale: [3] float32.
        hc_base: [(2+n)*n] float32.
        hc_mult: n, the number of streams.
        hc_sinkhorn_iters, hc_eps: as in the contract.

    Returns:
        [tokens, n], [tokens, n], [tokens, n, n], float32.
    """
    n = hc_mult
    part = torch.arange(mixes.shape[1], device=mixes.device) // n
    scale = hc_scale.index_select(0, part.clamp(max=2))  # pre, post, then comb for all the rest
    pre, post, comb = torch.split(mixes * scale + hc_base, [n, n, n * n], dim=1)
    matrix = sinkhorn(comb.reshape(-1, n, n), hc_sinkhorn_iters, hc_eps)
    return torch.sigmoid(pre) + hc_eps, 2 * torch.sigmoid(post), matrix


def hyper_connection_mix(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three weight sets of one sublayer, from the streams before it (spec 4). All float32.

    Args:
        hidden_states: [batch, tokens, n, dim].
        hc_fn: [(2+n)*n, n*dim] float32.
        hc_scale: [3] float32.
        hc_base: [(2+n)*n] float32.
        hc_sinkhorn_iters, hc_eps, norm_eps: as in the contract.

    Returns:
        pre [batch, tokens, n], post [batch, tokens, n], comb [batch, tokens, n, n].
    """
    batch, tokens, n, dim = hidden_states.shape
    flat = hidden_states.reshape(batch * tokens, n * dim).to(torch.float32)
    # rms_norm keeps an epsilon of 1e-20 through the exporter, which drops an addition that small.
    unit = F.rms_norm(flat, (n * dim,), torch.ones(n * dim, device=flat.device), norm_eps)
    pre, post, comb = split_mixes(F.linear(unit, hc_fn), hc_scale, hc_base, n, hc_sinkhorn_iters, hc_eps)
    return (
        pre.reshape(batch, tokens, n),
        post.reshape(batch, tokens, n),
        comb.reshape(batch, tokens, n, n),
    )
