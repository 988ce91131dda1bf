"""Everything a rank does for routed experts that are spread over ranks: its own share, its lane, and serving others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec
from engram_trt.runtime.distributed.expert_lane import AllToAll, LaneGroup, LaneLayouts, LaneServer
from engram_trt.runtime.experts.device_share import DeviceShare
from engram_trt.runtime.experts.parcels import expert_shares
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.stage_runners.contract import Backend

Connect = Callable[[tuple[int, ...]], AllToAll | None]
"""Members of a lane -> the lane; None for a rank that is no member. All ranks call it alike, in the same order."""


class RankExperts:
    """The experts of one rank.

    Args:
        deployment: names the devices that have experts; its devices are the ranks, in order.
        placed: the stages of each rank.
        num_experts: of a layer.
        limits: largest value of every symbol.
        rank: this one.
        backend: binds this rank's share, if it has one.
    """

    def __init__(
        self,
        deployment: DeploymentConfig,
        placed: Sequence[PlacedStages],
        num_experts: int,
        limits: Mapping[str, int],
        rank: int,
        backend: Backend,
    ) -> None:
        stages = tuple(stage for range_ in placed for stage in range_.stages if stage.kind == EXPERTS)
        self._ranks = tuple(deployment.devices.index(device) for device in deployment.experts)
        self._homes = tuple(home for home, range_ in enumerate(placed) if _has_experts(range_.stages))
        self._layouts, self._rank = LaneLayouts(stages, limits), rank
        device = placed[rank].device
        self._share = DeviceShare(device, backend, stages, limits) if rank in self._ranks else None
        shares = expert_shares(num_experts, len(self._ranks))
        self.group = LaneGroup(shares, self._ranks, self._layouts, self._share, rank)
        self._servers: list[LaneServer] = []

    def connect(self, connect: Connect, failed: Callable[[Exception], None]) -> None:
        """Open the lanes of all ranks whose layers ask.

        Args:
            connect: opens one.
            failed: is told why serving one ended before its time.
        """
        for home in self._homes:
            members = tuple(sorted({home, *self._ranks}))
            lane = connect(members) if len(members) > 1 else None
            if lane is None:
                continue
            if home == self._rank:
                self.group.lane = lane
            elif self._share is not None:
                self._servers.append(LaneServer(lane, home, self._layouts, self._share, failed))
                self._servers[-1].start()

    def end(self) -> None:
        """Let the others go, and wait until they let this rank go."""
        self.group.end()
        for server in self._servers:
            server.join()


def _has_experts(stages: Sequence[StageSpec]) -> bool:
    return any(stage.kind == EXPERTS for stage in stages)
