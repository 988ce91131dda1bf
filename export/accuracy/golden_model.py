"""A golden model: its inputs, and a session over it through either back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.limits import Limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.accuracy.golden_folder import GoldenFolder, model_file, require_model
from engram_trt.export.accuracy.golden_source import GoldenSource, token_map_of
from engram_trt.export.accuracy.golden_taps import TappedBackend
from engram_trt.export.graph_pool import trace_kinds
from engram_trt.export.graph_store import GraphStore, default_folder
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.weights import experts_are_packed, resident_tensor
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.stages.chain import stage_specs
from engram_trt.export.torch_runner import TorchBackend
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.contract import Backend
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend
from engram_trt.runtime.step_inputs import IMAGE, IMAGE_START, RowInput, image_rows

MAX_ROLLBACK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenModel:
    """What a model was run on.

    Args:
        name: of its folder.
        source: weights in one numeric mode.
        mode: the numeric mode.
        ids: [batch, length] int64, prompt and teacher-forced tokens.
        prefill_len: tokens of the first pass.
        token_map: [vocab_size] int64.
        image_mask: [batch, length] bool, or None where the model got no images.
        image_embeddings: [batch, length, dim] float32, or None.
    """

    name: str
    source: GoldenSource
    mode: str
    ids: npt.NDArray[np.int64]
    prefill_len: int
    token_map: Tensor
    image_mask: npt.NDArray[np.bool_] | None
    image_embeddings: npt.NDArray[np.float32] | None

    @classmethod
    def open(cls, folder: GoldenFolder, name: str, mode: str) -> GoldenModel:
        """Read config, inputs and weights; CheckpointError or ConfigError if they do not fit."""
        require_model(folder, name)
        source = GoldenSource.open(folder.path / "model" / name, mode)
        inputs = folder.tensors(model_file(name, "inputs"))
        missing = {"input_ids", "prefill_len", "token_map"} - inputs.keys()
        if missing:
            raise CheckpointError(
                str(folder.path / model_file(name, "inputs")),
                found=f"no {', '.join(sorted(missing))}",
                expected="input_ids, prefill_len and token_map",
                remedy="Copy the folder again.",
            )
        ids = inputs["input_ids"].numpy()
        mask, rows = _images(inputs, source, ids.shape)
        return cls(
            name=name,
            source=source,
            mode=mode,
            ids=ids,
            prefill_len=int(inputs["prefill_len"][0]),
            token_map=token_map_of(inputs),
            image_mask=mask,
            image_embeddings=rows,
        )

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def batch(self) -> int:
        return int(self.ids.shape[0])

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def deployment(self) -> DeploymentConfig:
        """Limits the model's tokens fit in, and the numerics of the mode."""
        quantised = "reference" if self.mode.endswith("_q") else "none"
        limits = Limits(
            max_batch=self.batch,
            max_step_tokens=self.length,
            max_context=self.length,
            max_rollback=MAX_ROLLBACK,
        )
        return DeploymentConfig(
            limits=limits,
            dtype="bfloat16" if self.mode.startswith("bf16") else "float32",
            activation_quantization=quantised,
            cache_quantization=quantised,
            dspark_taps=self.config.has_dspark,
        )

    def row_input(self, row: int, start: int, stop: int) -> RowInput:
        """Tokens start..stop-1 of a row."""
        whole = RowInput(
            token_ids=self.ids[row],
            image_mask=None if self.image_mask is None else self.image_mask[row],
            image_embeddings=None if self.image_embeddings is None else self.image_embeddings[row],
        )
        return whole.slice(start, stop)

    def engine(self, backend: str, folder: Path, progress: Callable[[str], None]) -> Engine:
        """The model behind taps.

        Args:
            backend: `torch` or `onnxruntime`.
            folder: empty, for exported stages.
            progress: told what takes time.
        """
        compute = ComputeConfig.from_deployment(self.deployment)
        packed = experts_are_packed(self.source, 0)
        specs = stage_specs(self.config, compute, packed_experts=packed, dspark_taps=self.deployment.dspark_taps)
        token_map = self.token_map if self.config.has_engram else None
        inner: Backend
        if backend == "torch":
            inner = TorchBackend(self.source, compute, token_map)
        else:
            # Graphs of an earlier run serve again: they depend on config and numerics, not on weights.
            exporter = StageExporter(self.source, compute, token_map, GraphStore(default_folder()))
            inner = self._exported(specs, exporter, folder, progress)
        return Engine.load(self.config, self.deployment, specs, TappedBackend(inner, self.config))

    def _exported(
        self, specs: Sequence[StageSpec], exporter: StageExporter, folder: Path, progress: Callable[[str], None]
    ) -> OnnxRuntimeBackend:
        trace_kinds(exporter, specs, lambda kind: progress(f"{self.name} {self.mode}: traced {kind}"), max_workers=1)
        files = {spec.name: exporter.write(spec, folder).onnx for spec in specs}

        def residents(spec: StageSpec, binding: str) -> npt.NDArray[np.generic]:
            values = resident_tensor(self.source, spec.input(binding), torch.float32)
            return np.ascontiguousarray(values.numpy())

        return OnnxRuntimeBackend(files, residents, num_threads=1)


def _images(
    inputs: dict[str, Tensor], source: GoldenSource, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.bool_] | None, npt.NDArray[np.float32] | None]:
    """Mask and embedding rows of all positions; only the first pass holds images."""
    if "token_types" not in inputs:
        return None, None
    types = inputs["token_types"].numpy()
    mask = np.zeros(shape, dtype=np.bool_)
    mask[:, : types.shape[1]] = types >= IMAGE_START
    rows = np.zeros((*shape, source.config.dim), dtype=np.float32)
    vectors = [source.tensor(name).float().numpy() for name in ("image_start", "image_newline", "image_end")]
    for row in range(shape[0]):
        names = [name for name in inputs if name.startswith(f"image.{row}.") and name.endswith("features")]
        features = [inputs[name].float().numpy() for name in sorted(names)] if (types[row] == IMAGE).any() else []
        rows[row, : types.shape[1]] = image_rows(types[row], features, *vectors)
    return mask, rows


def open_session(engine: Engine) -> Session:
    """A session whose caches start as NaN: what was never written must not matter."""
    session = Session(engine)
    for buffer in session.buffers.state_buffers().values():
        buffer.write(np.full(buffer.num_elements, np.nan, dtype=np.float32))
    return session
