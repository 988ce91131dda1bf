"""Reference of `EngramHash`."""

from __future__ import annotations

import torch
from torch import Tensor


def engram_hash(
    compressed_ids: Tensor,
    token_history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Rows of every Engram table for each token (spec 2.4); exact in int64.

    An n-gram stops at the first look-back that is DEAD: from there on every older token counts as the pad.

    Args:
        compressed_ids: [batch, tokens] int64, DEAD (-1) at image positions.
        token_history: [batch, max_ngram_size-1] int64, oldest first, DEAD where no token exists.
        multipliers: [engram_layers, max_ngram_size] int64.
        primes: [engram_layers, max_ngram_size-1, heads] int64.
        offsets: [engram_layers, columns] int64.
        pad_id: compressed id of the pad token.

    Returns:
        [batch, tokens, engram_layers, columns] int64.
    """
    history = token_history.shape[1]
    tokens = compressed_ids.shape[1]
    ids = torch.cat([token_history, compressed_ids], dim=1)
    blocked = compressed_ids < 0
    # Products and XORs of non-negative int64 stay below 2^63 (spec 2.3), so `%` needs no sign handling.
    rolling = torch.where(blocked, pad_id, compressed_ids).unsqueeze(-1) * multipliers[:, 0]
    hashes = []
    for shift in range(1, history + 1):
        source = ids[:, history - shift : history - shift + tokens]
        blocked = blocked | (source < 0)
        term = torch.where(blocked, pad_id, source).unsqueeze(-1) * multipliers[:, shift]
        rolling = torch.bitwise_xor(rolling, term)
        hashes.append(torch.remainder(rolling.unsqueeze(-1), primes[:, shift - 1]))
    return torch.cat(hashes, dim=-1) + offsets
