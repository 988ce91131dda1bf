"""Which tensors travel from each rank to the next, worked out from the interfaces of the stages.

Messages go around: rank 0 -> 1 -> ... -> last -> 0. Forwards goes what a later rank reads; all the way around go the
results that the session reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.runtime.distributed.wire import Header, Item, Layout, Op, refused
from engram_trt.runtime.execution import CONSTANT_INPUTS
from engram_trt.runtime.placement import PlacedStages

RESULTS = ("logits", "dspark_tap")
"""Tensors that the session reads, besides those of rank 0's own stages."""


class Routes:
    """Layouts of every message.

    Args:
        placed: the stages of each rank.
    """

    def __init__(self, placed: Sequence[PlacedStages]) -> None:
        self.ranges = tuple(range_.stages for range_ in placed)
        self.world_size = len(placed)
        self.carried = tuple(self._carried(rank) for rank in range(self.world_size))
        """Rank -> specs of what a step sends from it to the next."""

    def step_layout(self, sender: int, sizes: Mapping[str, int]) -> Layout:
        """The payload of a step's message that leaves a rank."""
        specs = self.carried[sender]
        return Layout([Item(key=spec.key, dtype=spec.dtype, shape=spec.resolve(sizes)) for spec in specs])

    def row_layout(self, ranks: Sequence[int], num_tokens: int, limits: Mapping[str, int]) -> Layout:
        """The caches of one row in some ranks, flat, as `SessionBuffers.save_row` gives them."""
        items = []
        for spec in self._states(ranks):
            entries, symbol = spec.resolve(limits)[1], spec.shape[1]
            if isinstance(symbol, str) and symbol.startswith("entries_r"):
                entries = min(entries, num_tokens // int(symbol.removeprefix("entries_r")) + 1)
            width = 1
            for extent in spec.resolve(limits)[2:]:
                width *= extent
            items.append(Item(key=spec.key, dtype=spec.dtype, shape=(entries * width,)))
        return Layout(items)

    def _states(self, ranks: Sequence[int]) -> list[TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for rank in ranks:
            for stage in self.ranges[rank]:
                for spec in stage.inputs:
                    if spec.role == "state":
                        specs.setdefault(spec.key, spec)
        return list(specs.values())

    def _carried(self, sender: int) -> tuple[TensorSpec, ...]:
        found: dict[str, TensorSpec] = {}
        written: set[str] = set()
        for stage in self._stages(range(sender + 1, self.world_size)):
            for spec in stage.inputs:
                is_constant = spec.name.startswith(CONSTANT_INPUTS)
                if spec.role in ("step", "activation") and not is_constant and spec.key not in written:
                    found.setdefault(spec.key, spec)
            written |= {spec.key for spec in stage.outputs}
        for stage in self._stages(range(1, sender + 1)):
            found |= {spec.key: spec for spec in stage.outputs if spec.tensor in RESULTS}
        return tuple(found.values())

    def _stages(self, ranks: Sequence[int]) -> list[StageSpec]:
        return [stage for rank in ranks for stage in self.ranges[rank]]


class Layouts:
    """What the payload of every message from one rank to the next must be.

    Args:
        routes: of the whole chain.
        sender: the rank that sends.
        symbols: names of the sizes, in the order in which messages give them.
    """

    def __init__(self, routes: Routes, sender: int, symbols: Sequence[str]) -> None:
        self._routes, self._sender, self._symbols = routes, sender, tuple(symbols)
        self._limits: dict[int, Mapping[str, int]] = {}

    def of(self, header: Header) -> Layout:
        """The layout; ClusterError for a message that no session would send."""
        if header.op is Op.OPEN:
            self._limits[header.chain] = self.sizes(header)
            return Layout([])
        if header.op in (Op.RECORD, Op.END):
            return Layout([])
        limits = self._limits.get(header.chain)
        if limits is None:
            raise refused(f"{header.op.name} of session {header.chain}", "a session that was opened")
        if header.op is Op.STEP:
            sizes = self.sizes(header)
            large = [symbol for symbol, size in sizes.items() if not 1 <= size <= max(limits[symbol], 1)]
            if large:
                raise refused(f"{large[0]} = {sizes[large[0]]}", f"1..{limits[large[0]]}")
            return self._routes.step_layout(self._sender, sizes)
        if header.op is Op.CLOSE:
            del self._limits[header.chain]
            return Layout([])
        if len(header.numbers) != 2 or not 0 <= header.numbers[0] < limits["batch"]:
            raise refused(f"{header.op.name} with the numbers {header.numbers}", "row, tokens")
        ranks = range(1, self._sender + 1) if header.op is Op.SAVE else range(self._sender + 1, self._routes.world_size)
        return self._routes.row_layout(ranks, header.numbers[1], limits)

    def sizes(self, header: Header) -> dict[str, int]:
        """Symbol -> size, as an OPEN or STEP gives them."""
        if len(header.numbers) != len(self._symbols):
            raise refused(f"{len(header.numbers)} sizes", f"{len(self._symbols)}: {', '.join(self._symbols)}")
        return dict(zip(self._symbols, header.numbers, strict=True))

    def capacity(self, header: Header) -> int:
        """Bytes of a session's largest step; 0 for a message that is of no session."""
        limits = self._limits.get(header.chain)
        return 0 if limits is None else self._routes.step_layout(self._sender, limits).num_bytes
