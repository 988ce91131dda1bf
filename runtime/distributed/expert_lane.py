"""Routed experts in other processes: a lane for each rank whose layers ask, tokens out and outputs back by all-to-all.

Only the rank that asks has tokens, so of its all-to-alls the parts between the others are empty. Lanes have process
groups of their own: two ranks may ask each other at the same time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import numpy as np

from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.distributed.payload import Bytes
from engram_trt.runtime.distributed.wire import Integers, Item, Layout, refused
from engram_trt.runtime.experts.device_share import DeviceShare
from engram_trt.runtime.experts.parcels import Parcel
from engram_trt.runtime.experts.spread import ExpertGroup
from engram_trt.runtime.stage_runners.contract import Array

_SLOTS = 6
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class Op(IntEnum):
    """What the rank that asks wants of the others."""

    RUN = 1
    END = 2


class AllToAll(ABC):
    """Bytes from every member of a lane to every other."""

    members: tuple[int, ...]
    """Ranks, in order."""

    @abstractmethod
    def exchange(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """All members call it together.

        Args:
            parts: for each member, what it is sent.
            sizes: bytes that each member sends here.

        Returns:
            what they sent.
        """


class LaneLayouts:
    """What travels in a lane, worked out alike by all members.

    Args:
        stages: the `experts` stages of the chain.
        limits: largest value of every symbol.
    """

    def __init__(self, stages: Sequence[StageSpec], limits: Mapping[str, int]) -> None:
        self.names = tuple(stage.name for stage in stages)
        tensors = {tensor.name: tensor for tensor in (*stages[0].inputs, *stages[0].outputs)}
        self._taken = [tensors[name] for name in ("ffn_in", "expert_ids", "expert_weights")]
        self._output = tensors["expert_outputs"]
        self._limits = limits

    def parcel(self, num_tokens: int) -> Layout:
        """Tokens that are sent out."""
        sizes = {**self._limits, "batch": 1, "tokens": num_tokens}
        return Layout([Item(key=t.name, dtype=t.dtype, shape=t.resolve(sizes)[1:]) for t in self._taken])

    def outputs(self, num_outputs: int) -> Layout:
        """Outputs that come back."""
        dim = self._output.resolve(self._limits)[-1]
        return Layout([Item(key="expert_outputs", dtype=self._output.dtype, shape=(num_outputs, dim))])

    def pack(self, parcel: Parcel) -> Bytes:
        """A parcel's bytes."""
        values = {
            "ffn_in": parcel.ffn_in,
            "expert_ids": parcel.expert_ids,
            "expert_weights": parcel.expert_weights,
        }
        return _packed(self.parcel(parcel.num_tokens), values)

    def unpack(self, num_tokens: int, memory: Bytes) -> Parcel:
        """The inverse of `pack`."""
        return Parcel(**{key: view.read() for key, view in self.parcel(num_tokens).views(memory).items()})

    def check(self, header: Integers) -> None:
        """ClusterError for a header that no rank of this chain would send."""
        op, stage, batch, tokens, num_tokens, num_outputs = header.tolist()
        shape = self._limits["batch"], self._limits["tokens"]
        activated = self._taken[1].resolve(self._limits)[-1]
        is_step = 0 <= stage < len(self.names) and 1 <= batch <= shape[0] and 1 <= tokens <= shape[1]
        is_parcel = 0 <= num_tokens <= batch * tokens and num_tokens <= num_outputs <= num_tokens * activated
        if op != Op.END and (op != Op.RUN or not is_step or not is_parcel):
            raise refused(
                f"a request for experts of {header.tolist()}",
                f"a step of at most {shape} rows and tokens for one of {len(self.names)} stages",
            )


class LaneGroup(ExpertGroup):
    """The end of a lane that asks.

    Args:
        shares: experts of each member that has some.
        ranks: those members.
        layouts: of what travels.
        own: the experts that this rank has itself, None if it has none.
        rank: this one.
    """

    def __init__(
        self,
        shares: tuple[range, ...],
        ranks: tuple[int, ...],
        layouts: LaneLayouts,
        own: DeviceShare | None,
        rank: int,
    ) -> None:
        self.shares, self._ranks, self._layouts, self._own, self._rank = shares, ranks, layouts, own, rank
        self.lane: AllToAll | None = None
        """Connected when all ranks have loaded; None where this rank alone has experts."""
        self._is_under_way = False
        self._lock = threading.Lock()

    def run(self, stage: str, shape: tuple[int, int], parcels: Sequence[Parcel]) -> list[Array]:
        with self._lock:
            if self._is_under_way:
                raise refused("a request behind one that was broken off", "one whose answers were taken")
            self._is_under_way = self.lane is not None
            sent = dict(zip(self._ranks, parcels, strict=True))
            mine = sent.pop(self._rank, None)
            self._send(stage, shape, sent)
            try:
                own = [] if mine is None or self._own is None else [self._own.run(stage, shape, mine)]
            finally:  # the others send their answers whatever happens here
                found = self._receive(sent)
                self._is_under_way = False
        return [own[0] if rank == self._rank else found[rank] for rank in self._ranks]

    def _send(self, stage: str, shape: tuple[int, int], sent: dict[int, Parcel]) -> None:
        if self.lane is None:
            return
        number = self._layouts.names.index(stage)
        headers = {
            rank: np.array([Op.RUN, number, *shape, p.num_tokens, p.num_outputs], dtype=np.int64).view(np.uint8)
            for rank, p in sent.items()
        }
        packed = {rank: self._layouts.pack(parcel) for rank, parcel in sent.items()}
        nothing = [0] * len(self.lane.members)
        for parts in (headers, packed):
            self.lane.exchange([parts.get(rank, _NOTHING) for rank in self.lane.members], nothing)

    def _receive(self, sent: dict[int, Parcel]) -> dict[int, Array]:
        if self.lane is None:
            return {}
        members = self.lane.members
        layouts = {rank: self._layouts.outputs(parcel.num_outputs) for rank, parcel in sent.items()}
        sizes = [layouts[rank].num_bytes if rank in layouts else 0 for rank in members]
        memory = dict(zip(members, self.lane.exchange([_NOTHING] * len(members), sizes), strict=True))
        return {rank: layout.views(memory[rank])["expert_outputs"].read() for rank, layout in layouts.items()}

    def num_bytes(self, stage: str) -> int:
        return 0 if self._own is None else self._own.num_bytes(stage)

    def end(self) -> None:
        """Let the others go."""
        if self.lane is not None:
            header = np.array([Op.END, *[0] * (_SLOTS - 1)], dtype=np.int64).view(np.uint8)
            parts = [_NOTHING if rank == self._rank else header for rank in self.lane.members]
            self.lane.exchange(parts, [0] * len(parts))

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class LaneServer:
    """The end of a lane that has experts: a thread that runs what arrives.

    Args:
        lane: the lane.
        home: rank that asks.
        layouts: of what travels.
        share: this rank's experts.
        failed: is told why serving ended before its time.
    """

    def __init__(
        self,
        lane: AllToAll,
        home: int,
        layouts: LaneLayouts,
        share: DeviceShare,
        failed: Callable[[Exception], None],
    ) -> None:
        self._lane, self._home, self._layouts, self._share = lane, home, layouts, share
        self._failed = failed
        self._thread = threading.Thread(target=self._serve, name=f"experts for rank {home}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the rank that asks has let this one go."""
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_one():
                pass
        except Exception as error:  # noqa: BLE001 - whatever the transport raises ends the chain, by name
            self._failed(error)

    def _serve_one(self) -> bool:
        header = self._from_home(8 * _SLOTS).view(np.int64)
        self._layouts.check(header)
        op, stage, batch, tokens, num_tokens, num_outputs = header.tolist()
        if op == Op.END:
            return False
        parcel = self._layouts.unpack(num_tokens, self._from_home(self._layouts.parcel(num_tokens).num_bytes))
        if parcel.num_outputs != num_outputs:
            raise refused(f"{parcel.num_outputs} chosen experts", f"{num_outputs}")
        outputs = self._share.run(self._layouts.names[stage], (batch, tokens), parcel)
        answer = _packed(self._layouts.outputs(num_outputs), {"expert_outputs": outputs})
        members = self._lane.members
        self._lane.exchange([answer if rank == self._home else _NOTHING for rank in members], [0] * len(members))
        return True

    def _from_home(self, num_bytes: int) -> Bytes:
        members = self._lane.members
        sizes = [num_bytes if rank == self._home else 0 for rank in members]
        return self._lane.exchange([_NOTHING] * len(members), sizes)[members.index(self._home)]


def _packed(layout: Layout, values: dict[str, Array]) -> Bytes:
    memory = np.empty(layout.num_bytes, dtype=np.uint8)
    for key, view in layout.views(memory).items():
        view.write(values[key])
    return memory
