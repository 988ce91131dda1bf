"""Which device has which experts, what each of them is sent, and where its answers go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engram_trt.runtime.stage_runners.contract import Array

Integers = npt.NDArray[np.integer]


def expert_shares(num_experts: int, num_devices: int) -> tuple[range, ...]:
    """Consecutive expert ids for each device, as many as for the others or one more."""
    bounds = [num_experts * number // num_devices for number in range(num_devices + 1)]
    return tuple(range(first, last) for first, last in pairwise(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Tokens of a step for one device.

    Args:
        ffn_in: [n, dim], the tokens that use an expert there.
        expert_ids: int32 [n, activated], counted from the device's first expert; -1 where an expert is elsewhere.
        expert_weights: float32 [n, activated].
    """

    ffn_in: Array
    expert_ids: Array
    expert_weights: Array

    @property
    def num_tokens(self) -> int:
        return int(self.ffn_in.shape[0])

    @property
    def num_outputs(self) -> int:
        """Outputs to come back: one for each token and expert that is there."""
        return int(np.count_nonzero(self.expert_ids >= 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressed:
    """A parcel and the tokens of the step that are in it, int64 [n]."""

    parcel: Parcel
    tokens: Integers


def pack_parcels(ffn_in: Array, expert_ids: Array, expert_weights: Array, shares: Sequence[range]) -> list[Addressed]:
    """One parcel for each device.

    Args:
        ffn_in: [tokens, dim].
        expert_ids: int32 [tokens, activated].
        expert_weights: float32 [tokens, activated].
        shares: experts of each device.
    """
    packed = []
    for share in shares:
        is_there = (expert_ids >= share.start) & (expert_ids < share.stop)
        tokens = np.flatnonzero(is_there.any(axis=1))
        ids = np.where(is_there[tokens], expert_ids[tokens] - share.start, -1).astype(np.int32)
        parcel = Parcel(ffn_in=ffn_in[tokens], expert_ids=ids, expert_weights=expert_weights[tokens])
        packed.append(Addressed(parcel=parcel, tokens=tokens))
    return packed


def unpack_outputs(packed: Sequence[Addressed], outputs: Sequence[Array], target: Array) -> None:
    """Put the devices' answers into their places.

    Args:
        packed: what was sent.
        outputs: of each device, [num_outputs, dim], token by token, slot by slot.
        target: [tokens, activated, dim], receives them.
    """
    for addressed, values in zip(packed, outputs, strict=True):
        places, slots = np.nonzero(addressed.parcel.expert_ids >= 0)
        target[addressed.tokens[places], slots] = values
