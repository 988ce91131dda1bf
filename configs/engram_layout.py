"""Constants of the Engram hash: primes, column offsets and multipliers (spec 2.2, 2.3).

Everything is derived from a handful of config values, in int64 from end to end: hash products exceed 2^53, so
a single detour through a double would give wrong rows that look right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engram_trt.configs.model import ModelConfig

Int64Array = npt.NDArray[np.int64]

_INT64_MAX = 2**63 - 1
_SEED_STRIDE = 10007


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases that expose every composite number below 3.1e23 (Miller-Rabin)."""


def _is_prime(number: int) -> bool:
    """Whether a number below 3.1e23 is prime."""
    if number < 2 or any(number % base == 0 for base in _WITNESSES):
        return number in _WITNESSES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    for base in _WITNESSES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=64)
def _consecutive_primes(search_start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are not below `search_start`."""
    primes: list[int] = []
    candidate = max(search_start, 2)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def _multipliers(layer_id: int, num_shifts: int, compressed_vocab_size: int) -> Int64Array:
    """Odd factors of one layer, int64 [num_shifts]: small enough that no id times a factor passes 2^63."""
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_STRIDE * layer_id).integers(0, bound, size=num_shifts, dtype=np.int64)
    return 2 * draws + 1


def _frozen(array: Int64Array) -> Int64Array:
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngramLayout:
    """Hash constants of L Engram layers, n-grams of 2..n tokens and H heads; arrays are read-only int64.

    Attributes:
        layer_ids: the L layers, in the order in which primes were handed out.
        primes: [L, n-1, H], the modulus of each column.
        offsets: [L, (n-1)*H], the first table row of each column.
        multipliers: [L, n], by look-back (0 = the current token).
        num_embeddings: table rows of each layer: the sum of its primes.
    """

    layer_ids: tuple[int, ...]
    primes: Int64Array
    offsets: Int64Array
    multipliers: Int64Array
    num_embeddings: tuple[int, ...]

    @classmethod
    def derive(
        cls,
        layer_ids: Sequence[int],
        vocab_size: int,
        max_ngram_size: int,
        n_heads: int,
        compressed_vocab_size: int,
    ) -> EngramLayout:
        """Derive the layout.

        No prime serves twice: each (layer, n-gram size) starts its search at `vocab_size` again and skips the
        primes that are taken, which hands out consecutive primes.

        Args:
            layer_ids: Engram layers in config order.
            vocab_size: where the search for primes starts (`engram_vocab_size`).
            max_ngram_size: the longest n-gram, at least 2.
            n_heads: hash heads of each n-gram size.
            compressed_vocab_size: distinct compressed token ids.
        """
        num_layers, num_sizes = len(layer_ids), max_ngram_size - 1
        flat = _consecutive_primes(vocab_size, num_layers * num_sizes * n_heads)
        primes = np.array(flat, dtype=np.int64).reshape(num_layers, num_sizes, n_heads)
        columns = primes.reshape(num_layers, num_sizes * n_heads)
        offsets = np.zeros_like(columns)
        np.cumsum(columns[:, :-1], axis=1, out=offsets[:, 1:])
        multipliers = np.zeros((num_layers, max_ngram_size), dtype=np.int64)
        for index, layer_id in enumerate(layer_ids):
            multipliers[index] = _multipliers(layer_id, max_ngram_size, compressed_vocab_size)
        return cls(
            layer_ids=tuple(layer_ids),
            primes=_frozen(primes),
            offsets=_frozen(offsets),
            multipliers=_frozen(multipliers),
            num_embeddings=tuple(int(total) for total in columns.sum(axis=1)),
        )

    @classmethod
    def from_config(cls, config: ModelConfig) -> EngramLayout:
        """The layout of a model; with no Engram layers every array has length 0 on its first axis."""
        return cls.derive(
            config.engram_layer_ids,
            config.engram_vocab_size,
            max(config.engram_max_ngram_size, 2),
            max(config.engram_n_heads, 1),
            max(config.engram_compressed_vocab_size, 1),
        )
