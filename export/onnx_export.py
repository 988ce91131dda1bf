"""One stage as an .onnx file and its data file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.atomic_folder import write_atomically
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.graph_store import GraphStore
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.weights import WeightSource, dense_chunks
from engram_trt.export.passes.cleanup import drop_untyped_values
from engram_trt.export.passes.functions import FunctionLibrary
from engram_trt.export.passes.weights import StoredWeight, externalize, point_to_data
from engram_trt.export.provenance import graph_key
from engram_trt.export.stages.chain import (
    DTYPE_NAMES,
    computed_weights,
    stage_module,
    stage_prefix,
)
from engram_trt.export.stages.interfaces import computed_names
from engram_trt.export.tracing import trace_stage, weight_tensors

IR_VERSION = 10
"""The first with function overloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFiles:
    """The files of a stage, as written, with their SHA-256 (hex)."""

    onnx: Path
    onnx_sha256: str
    data: Path
    data_sha256: str


def ignore_progress(num_bytes: int) -> None:
    """For callers that show none."""


class StageExporter:
    """Exports the stages of one model; a kind is traced once, a function body is made once.

    Args:
        source: config and weights.
        compute: dtype and roundings.
        token_map: [vocab_size] int64, for a model with Engram.
        graphs: graphs that earlier exporters made; added to. In memory only by default.
    """

    def __init__(
        self,
        source: WeightSource,
        compute: ComputeConfig,
        token_map: Tensor | None,
        graphs: GraphStore | None = None,
    ) -> None:
        self.source, self.compute, self.token_map = source, compute, token_map
        self._functions = FunctionLibrary(source.config, DTYPE_NAMES[compute.dtype])
        self._graphs = graphs or GraphStore(None)

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def has_graph(self, spec: StageSpec) -> bool:
        """Whether the graph of the stage's kind is there already."""
        return self._graphs.find(self._key(spec)) is not None

    def add_graph(self, spec: StageSpec, model: onnx.ModelProto) -> None:
        """Take a graph made elsewhere by `stage_graph`."""
        self._graphs.add(self._key(spec), model)

    def graph(self, spec: StageSpec) -> onnx.ModelProto:
        """The graph of a stage's kind, weights still inputs; do not change it."""
        found = self._graphs.find(self._key(spec))
        if found is None:
            found = stage_graph(spec, self.config, self.compute, self.token_map, self._functions)
            self.add_graph(spec, found)
        return found

    def _key(self, spec: StageSpec) -> str:
        pad_id = None if self.token_map is None else int(self.token_map[self.config.engram_pad_id])
        return graph_key(spec, self.config, self.compute, pad_id)

    def weights(self, spec: StageSpec) -> dict[str, StoredWeight]:
        """Every weight of a stage; values are made when its chunks are asked for."""
        computed = computed_weights(spec, self.config, self.token_map)
        prefix, stored = stage_prefix(spec), {}
        for name, tensor in weight_tensors(self._shapes(spec)).items():
            chunks: Callable[[], Iterable[Tensor]]
            if name in computed:
                chunks = partial(_whole, computed[name])
            else:
                chunks = partial(dense_chunks, self.source, f"{prefix}{name}", tensor.shape, tensor.dtype)
            stored[name] = StoredWeight(shape=tuple(tensor.shape), dtype=tensor.dtype, chunks=chunks)
        return stored

    def stored_names(self, spec: StageSpec) -> tuple[str, ...]:
        """Tensors of the source that a stage's data file is made from, scales included."""
        computed = computed_names(spec, self.config)
        prefix = stage_prefix(spec)
        names = [f"{prefix}{name}" for name in weight_tensors(self._shapes(spec)) if name not in computed]
        scales = [f"{name.removesuffix('.weight')}.scale" for name in names if name.endswith(".weight")]
        return (*names, *(scale for scale in scales if self.source.has(scale)))

    def write(
        self, spec: StageSpec, folder: Path, *, zeros: bool = False, progress: Callable[[int], None] = ignore_progress
    ) -> StageFiles:
        """Write `<stage>.onnx` and `<stage>.data`; the .onnx file appears last, complete, and checked.

        Args:
            spec: the stage.
            folder: exists.
            zeros: write the data file as sparse zeros of full size.
            progress: called with the number of weight bytes just written.

        Raises:
            CheckpointError: a weight is absent, misshapen or damaged, or its shard changes meanwhile.
            OSError: the disk is full or not writable.
        """
        onnx_path, data_path = folder / f"{spec.name}.onnx", folder / f"{spec.name}.data"
        onnx_path.unlink(missing_ok=True)  # one of an earlier, unfinished export would not fit the new data
        model = self._own_graph(spec)
        data_sha256 = externalize(model, self.weights(spec), data_path, zeros=zeros, progress=progress)
        content = model.SerializeToString()
        write_atomically(onnx_path, content)
        onnx_sha256 = hashlib.sha256(content).hexdigest()
        return StageFiles(onnx=onnx_path, onnx_sha256=onnx_sha256, data=data_path, data_sha256=data_sha256)

    def file_bytes(self, spec: StageSpec) -> tuple[int, int]:
        """Sizes that `<stage>.onnx` and `<stage>.data` would have; no weight is read."""
        model = self._own_graph(spec)
        data_bytes = point_to_data(model, self.weights(spec), f"{spec.name}.data")
        return model.ByteSize(), data_bytes

    def drop_pages(self) -> None:
        """Give back the memory that reading weights has taken, where the source is mapped."""
        if isinstance(self.source, CheckpointSource):
            self.source.drop_pages()

    def _own_graph(self, spec: StageSpec) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(self.graph(spec))
        model.graph.name = spec.name
        return model

    def _shapes(self, spec: StageSpec) -> nn.Module:
        return shapes_only(spec, self.config, self.compute, self.token_map)


def shapes_only(spec: StageSpec, config: ModelConfig, compute: ComputeConfig, token_map: Tensor | None) -> nn.Module:
    """A stage's module without memory behind its weights."""
    with torch.device("meta"):
        return stage_module(spec, config, compute, token_map)


def stage_graph(
    spec: StageSpec,
    config: ModelConfig,
    compute: ComputeConfig,
    token_map: Tensor | None,
    functions: FunctionLibrary,
) -> onnx.ModelProto:
    """Trace a stage and attach the bodies of its ops; weights are inputs behind the stage's own.

    Raises:
        onnx.checker.ValidationError: what was traced is not valid ONNX; a bug.
    """
    return completed_graph(traced_graph(spec, config, compute, token_map), functions)


def traced_graph(
    spec: StageSpec, config: ModelConfig, compute: ComputeConfig, token_map: Tensor | None
) -> onnx.ModelProto:
    """A stage's graph whose custom ops have no bodies yet."""
    model = trace_stage(spec, shapes_only(spec, config, compute, token_map))
    drop_untyped_values(model)
    return model


def completed_graph(model: onnx.ModelProto, functions: FunctionLibrary) -> onnx.ModelProto:
    """The graph with its ops' bodies, checked; in place."""
    functions.attach(model)
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def _whole(values: Tensor) -> list[Tensor]:
    return [values]
