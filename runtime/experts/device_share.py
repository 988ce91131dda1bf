"""The experts that one device has, of all layers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from math import prod

import numpy as np

from engram_trt.configs.tensors import ITEM_BYTES, StageSpec, TensorSpec
from engram_trt.runtime.device_threads import DeviceThread, WorkThread, core_of
from engram_trt.runtime.execution import remembered
from engram_trt.runtime.experts.parcels import Parcel
from engram_trt.runtime.stage_runners.contract import Array, Backend, Run, View


class DeviceShare:
    """Runs parcels on one device, one at a time.

    It has a thread of its own, on the device's core if it has one: two devices that ask each other while their own
    threads wait for the answer would never get one.

    Args:
        device: its name.
        backend: binds the device's own experts where a stage asks for all.
        stages: the `experts` stages of the chain.
        limits: largest value of every symbol.
    """

    def __init__(self, device: str, backend: Backend, stages: tuple[StageSpec, ...], limits: Mapping[str, int]) -> None:
        self.device, self.backend = device, backend
        self.stages = {stage.name: stage for stage in stages}
        self._runners = {stage.name: backend.load(stage) for stage in stages}
        self._resident: dict[str, dict[str, View]] = {stage.name: _bound(backend, stage) for stage in stages}
        self._buffers = {
            tensor.name: backend.allocate(tensor.dtype, prod(tensor.resolve(limits)))
            for tensor in _handed_over(stages[0])  # the same for all
        }
        self._bound: dict[str, dict[tuple[int, ...], tuple[dict[str, View], Run]]] = {name: {} for name in self.stages}
        self._lock = threading.Lock()
        # Made here and not on first use: a thread that is pinned may not look beyond its core.
        self._thread = DeviceThread(device) if core_of(device) is not None else WorkThread(f"experts {device}")

    def start(self, stage: str, shape: tuple[int, int], parcel: Parcel) -> Future[Array]:
        """`run`, on the share's own thread."""
        return self._thread.submit(lambda: self.run(stage, shape, parcel))

    def run(self, stage: str, shape: tuple[int, int], parcel: Parcel) -> Array:
        """Outputs of a parcel's tokens and experts.

        Args:
            stage: name of an `experts` stage.
            shape: batch and tokens of the step; no parcel has more tokens than their product.
            parcel: the tokens.

        Returns:
            [num_outputs, dim], token by token, slot by slot; a copy.
        """
        count = parcel.num_tokens
        with self._lock:
            views, run = self._bind(stage, shape)
            ids = np.full((prod(shape), parcel.expert_ids.shape[1]), -1, dtype=np.int32)
            ids[:count] = parcel.expert_ids
            views["ffn_in"].buffer.write(parcel.ffn_in)
            views["expert_ids"].buffer.write(ids)
            views["expert_weights"].buffer.write(parcel.expert_weights)
            if count:
                run()
            outputs = views["expert_outputs"].read().reshape(*ids.shape, -1)[:count]
            chosen: Array = outputs[parcel.expert_ids >= 0]
            return chosen

    def num_bytes(self, stage: str) -> int:
        """Of a stage's experts that are bound here."""
        tensors = self.stages[stage].inputs
        resident = self._resident[stage]
        return sum(prod(resident[t.name].shape) * ITEM_BYTES[t.dtype] for t in tensors if t.name in resident)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _bind(self, stage: str, shape: tuple[int, int]) -> tuple[dict[str, View], Run]:
        def make() -> tuple[dict[str, View], Run]:
            sizes = dict(zip(("batch", "tokens"), shape, strict=True))
            tensors = _handed_over(self.stages[stage])
            views = {tensor.name: self._buffers[tensor.name].view(tensor.resolve(sizes)) for tensor in tensors}
            return views, self._runners[stage].bind({**self._resident[stage], **views})

        return remembered(self._bound[stage], shape, make)


def _handed_over(stage: StageSpec) -> tuple[TensorSpec, ...]:
    return (*(tensor for tensor in stage.inputs if tensor.role != "resident"), *stage.outputs)


def _bound(backend: Backend, stage: StageSpec) -> dict[str, View]:
    return {t.name: backend.resident(stage, t.name) for t in stage.inputs if t.role == "resident"}
