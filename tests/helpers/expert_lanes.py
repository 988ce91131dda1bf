"""Lanes between threads of one process, with a barrier in place of a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from engram_trt.runtime.distributed.expert_lane import AllToAll
from engram_trt.runtime.distributed.wire import Bytes


class _Meeting:
    def __init__(self, members: tuple[int, ...]) -> None:
        self.parts: dict[int, list[Bytes]] = {}
        self.barrier = threading.Barrier(len(members), timeout=60)


class ThreadAllToAll(AllToAll):
    """One member's end."""

    def __init__(self, rank: int, members: tuple[int, ...], meeting: _Meeting) -> None:
        self.rank, self.members, self._meeting = rank, members, meeting

    def exchange(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        assert len(parts) == len(sizes) == len(self.members)
        self._meeting.parts[self.rank] = [part.copy() for part in parts]
        self._meeting.barrier.wait()
        own = self.members.index(self.rank)
        received = [self._meeting.parts[member][own] for member in self.members]
        self._meeting.barrier.wait()
        assert [part.size for part in received] == list(sizes), (self.rank, sizes)
        return [np.ascontiguousarray(part) for part in received]


def lanes_between(members: tuple[int, ...]) -> dict[int, ThreadAllToAll]:
    """The ends of one lane."""
    meeting = _Meeting(members)
    return {rank: ThreadAllToAll(rank, members, meeting) for rank in members}
