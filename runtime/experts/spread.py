"""A layer's `experts` stage whose experts are on several devices: tokens are sent out, outputs come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from engram_trt.configs.tensors import StageSpec
from engram_trt.runtime.experts.device_share import DeviceShare
from engram_trt.runtime.experts.parcels import Parcel, pack_parcels, unpack_outputs
from engram_trt.runtime.stage_runners.contract import Array, Run, StageRunner, View


class ExpertGroup(ABC):
    """The devices that share the experts of a layer, as the device of that layer sees them."""

    shares: tuple[range, ...]
    """Experts of each device."""

    @abstractmethod
    def run(self, stage: str, shape: tuple[int, int], parcels: Sequence[Parcel]) -> list[Array]:
        """Run one parcel on each device, at the same time; see `DeviceShare.run`."""

    def num_bytes(self, stage: str) -> int:
        """Of a stage's experts that this process has bound."""
        return 0

    def close(self) -> None:  # noqa: B027 - a group may hold nothing that needs closing
        """End what the group has started."""


class LocalGroup(ExpertGroup):
    """Devices of one process.

    Args:
        shares: experts of each device.
        devices: in the same order.
        home: the device of the layers; its own part is run by who asks.
    """

    def __init__(self, shares: tuple[range, ...], devices: Sequence[DeviceShare], home: str) -> None:
        self.shares, self._devices, self._home = shares, tuple(devices), home

    def run(self, stage: str, shape: tuple[int, int], parcels: Sequence[Parcel]) -> list[Array]:
        pairs = list(zip(self._devices, parcels, strict=True))
        answers = [device.start(stage, shape, p) if device.device != self._home else None for device, p in pairs]
        own = [device.run(stage, shape, p) for device, p in pairs if device.device == self._home]
        return [own[0] if answer is None else answer.result() for answer in answers]

    def num_bytes(self, stage: str) -> int:
        return sum(device.num_bytes(stage) for device in self._devices)

    def close(self) -> None:
        for device in self._devices:
            device.close()


class SpreadExperts(StageRunner):
    """An `experts` stage without weights of its own.

    Args:
        spec: the stage as it was exported.
        group: runs the experts.
    """

    def __init__(self, spec: StageSpec, group: ExpertGroup) -> None:
        self.spec = replace(spec, inputs=tuple(tensor for tensor in spec.inputs if tensor.role != "resident"))
        self.group = group

    def bind(self, views: Mapping[str, View]) -> Run:
        ffn_in, ids, weights = (views[name] for name in ("ffn_in", "expert_ids", "expert_weights"))
        outputs = views["expert_outputs"]
        batch, tokens, dim = ffn_in.shape
        activated = ids.shape[2]
        name, group = self.spec.name, self.group

        def run() -> None:
            choice = ids.read().reshape(-1, activated), weights.read().reshape(-1, activated)
            packed = pack_parcels(ffn_in.read().reshape(-1, dim), *choice, group.shares)
            found = group.run(name, (batch, tokens), [addressed.parcel for addressed in packed])
            values = np.empty((batch * tokens, activated, dim), dtype=found[0].dtype)
            unpack_outputs(packed, found, values)
            outputs.write(values.reshape(outputs.shape))

        return run
