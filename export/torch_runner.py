"""The eager modules as a back end: the same session, caches and stages, computed by torch.

This is the truth the other back ends are compared with, and the baseline they are timed against.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.probe import Recorder
from engram_trt.export.modeling.weights import WeightSource, experts_are_packed, resident_tensor
from engram_trt.export.stages.chain import load_stage, stage_module, stage_specs
from engram_trt.plugins.float_tables import TORCH_DTYPES
from engram_trt.runtime.artifact import Artifact, require_cpu
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array, Backend, Buffer, Run, StageRunner, View
from engram_trt.runtime.token_map import TokenMap


class TorchBuffer(Buffer):
    """A flat torch tensor."""

    def __init__(self, dtype: str, storage: Tensor) -> None:
        super().__init__(dtype, storage.numel())
        self.storage = storage

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """The first elements as a tensor that shares the buffer's memory."""
        return self.storage[: int(np.prod(shape, dtype=np.int64))].view(shape)

    def write(self, values: Array, offset: int = 0) -> None:
        flat = torch.from_numpy(np.array(values).reshape(-1))  # a copy: some inputs are read-only
        self.storage[offset : offset + flat.numel()].copy_(flat)

    def read(self, shape: tuple[int, ...]) -> Array:
        values = self.tensor(shape)
        array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return array


def tensor_of(view: View) -> Tensor:
    """The tensor behind a view of this back end."""
    if not isinstance(view.buffer, TorchBuffer):
        raise TypeError(f"a view of {type(view.buffer).__name__} reached the torch back end")
    return view.buffer.tensor(view.shape)


class TorchStageRunner(StageRunner):
    """A stage's module."""

    def __init__(self, spec: StageSpec, module: nn.Module, backend: TorchBackend) -> None:
        self.spec, self.module, self.backend = spec, module, backend

    def bind(self, views: Mapping[str, View]) -> Run:
        inputs = {name: tensor_of(views[name]) for name in self.spec.input_names}
        fresh = [spec for spec in self.spec.outputs if spec.alias is None]
        targets = [tensor_of(views[spec.name]) for spec in fresh]
        names = tuple(spec.name for spec in fresh)
        prefix = "" if self.spec.layer_id is None else f"layers.{self.spec.layer_id}."

        @torch.no_grad()
        def run() -> None:
            recorder = self.backend.recorder
            if recorder is None:
                results = self.module(dict(inputs), names)
            else:
                with recorder.recording(prefix):
                    results = self.module(dict(inputs), names)
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        return run


class TorchBackend(Backend):
    """Loads modules and weights from a checkpoint.

    Args:
        source: the checkpoint.
        compute: dtype and roundings.
        token_map: [vocab_size] int64, for a model with Engram.
        expert_share: the experts to bind of every `experts` stage; None for all.
    """

    name = "torch"

    def __init__(
        self,
        source: WeightSource,
        compute: ComputeConfig,
        token_map: Tensor | None,
        expert_share: range | None = None,
    ) -> None:
        self.source, self.compute, self.token_map = source, compute, token_map
        self.expert_share = expert_share
        self.recorder: Recorder | None = None
        """Receives every probed value while set."""
        self._resident: dict[tuple[int, str], View] = {}

    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        return TorchBuffer(dtype, torch.zeros(num_elements, dtype=TORCH_DTYPES[dtype]))

    def load(self, spec: StageSpec) -> StageRunner:
        module = stage_module(spec, self.source.config, self.compute, self.token_map)
        load_stage(module, spec, self.source)
        return TorchStageRunner(spec, module.eval(), self)

    def resident(self, spec: StageSpec, binding: str) -> View:
        owner = spec.input(binding).owner
        if owner is None:
            raise ValueError(f"{spec.name}: resident input {binding} has no owner")
        key = (owner, binding)
        if key not in self._resident:
            values = resident_tensor(self.source, spec.input(binding), self.compute.dtype)
            if self.expert_share is not None and spec.kind == EXPERTS:
                values = values[self.expert_share.start : self.expert_share.stop].clone()
            buffer = TorchBuffer(spec.input(binding).dtype, values.reshape(-1))
            self._resident[key] = buffer.view(tuple(values.shape))
        return self._resident[key]


def torch_engine(source: WeightSource, deployment: DeploymentConfig, token_map: Tensor | None) -> Engine:
    """The eager model over a checkpoint.

    Args:
        source: the checkpoint.
        deployment: limits and numerics.
        token_map: [vocab_size] int64, for a model with Engram.
    """
    compute = ComputeConfig.from_deployment(deployment)
    packed = source.config.n_layers > 0 and experts_are_packed(source, 0)
    stages = stage_specs(
        source.config,
        compute,
        packed_experts=packed,
        dspark_taps=deployment.dspark_taps,
        split_experts=bool(deployment.experts),
    )
    return Engine.load(source.config, deployment, stages, TorchBackend(source, compute, token_map))


def torch_backend(artifact: Artifact, device: str | None = None) -> Backend:
    """The entry point of back end `torch`: the eager modules with the weights of an artefact's checkpoint."""
    require_cpu("torch", device)
    token_map = None
    if artifact.config.has_engram:
        token_map = torch.from_numpy(TokenMap.for_model(artifact.tokenizer(), artifact.config).ids.copy())
    compute = ComputeConfig.from_deployment(artifact.manifest.deployment)
    source = CheckpointSource(checkpoint=artifact.checkpoint)
    return TorchBackend(source, compute, token_map, artifact.expert_share)
