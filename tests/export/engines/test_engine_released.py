"""One block of every layer kind at the released shapes: traced without weights, built for both targets."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from engine_jobs_for_tests import BACKEND, TARGETS, pool_in

from engram_trt.configs.engram_layout import EngramLayout
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import deployment_preset, model_preset
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.atomic_folder import write_atomically
from engram_trt.export.engines.jobs import EngineJob, job_folder
from engram_trt.export.engines.profiles import stage_profiles
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.passes.weights import StoredWeight, externalize
from engram_trt.export.stages.chain import stage_specs

MAX_SECONDS, MAX_BYTES, MAX_PLAN_BYTES = 10.0, 3 << 30, 16 << 20


class NoWeights:
    """Shapes only: a source whose values nobody may ask for."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"a build without weights asked for {name}")


def released_kinds() -> dict[str, StageSpec]:
    """First block of every layer kind of the released model, bfloat16."""
    config = model_preset("released")
    compute = ComputeConfig.from_deployment(deployment_preset("released").with_dtype("bfloat16"))
    kinds: dict[str, StageSpec] = {}
    for spec in stage_specs(config, compute, packed_experts=True, dspark_taps=False):
        if spec.layer_id is not None:
            kinds.setdefault(spec.kind, spec)
    return kinds


KINDS = released_kinds()
NORMAL = ("r1_reader", "r2_source_engram")
"""Built in every run: the commonest kind, and the one with every operation; the others are large tests."""


@pytest.fixture(scope="session")
def exporter() -> StageExporter:
    config = model_preset("released")
    compute = ComputeConfig.from_deployment(deployment_preset("released").with_dtype("bfloat16"))
    return StageExporter(NoWeights(config), compute, None)  # type: ignore[arg-type]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> StoredWeight:
    """A weight of zeros, made only if it is small enough to be asked for."""
    return StoredWeight(shape=shape, dtype=dtype, chunks=lambda: [torch.zeros(shape, dtype=dtype)])


def write_stage(exporter: StageExporter, spec: StageSpec, folder: Path) -> tuple[Path, Path]:
    """The stage's files with zeros for weights, sparse."""
    model = onnx.ModelProto()
    model.CopyFrom(exporter.graph(spec))
    data = folder / f"{spec.name}.data"
    weights = {name: zeros(weight.shape, weight.dtype) for name, weight in exporter.weights(spec).items()}
    externalize(model, weights, data, zeros=True, progress=lambda num_bytes: None)
    path = folder / f"{spec.name}.onnx"
    write_atomically(path, model.SerializeToString())
    return path, data


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in NORMAL else pytest.mark.large) for kind in KINDS]
)
def test_a_released_block_is_built_for_both_targets(exporter: StageExporter, tmp_path: Path, kind: str) -> None:
    spec, config = KINDS[kind], exporter.config
    path, data = write_stage(exporter, spec, tmp_path)
    rows = EngramLayout.from_config(config).num_embeddings if any("table_rows" in t.shape for t in spec.inputs) else ()
    folder = job_folder(tmp_path, "job")
    job = EngineJob(
        backend=BACKEND,
        stage=spec,
        onnx=str(path),
        data=str(data),
        targets=TARGETS,
        profiles=stage_profiles(spec, config, deployment_preset("released").limits, rows),
        bake_weights=False,
        folder=str(folder),
    )
    finished, built = pool_in(tmp_path, memory_bytes=MAX_BYTES).build(job)
    plan_bytes = (folder / "stage.plan").stat().st_size
    print(f"{kind}: {built['build_ms']:.0f} ms, {finished.peak_bytes >> 20} MiB, plan {plan_bytes:,} bytes")
    assert finished.peak_bytes < MAX_BYTES
    assert plan_bytes < MAX_PLAN_BYTES
    layers = built["plugin_layers"]
    assert {"HyperConnectionMix": 2, "MoEExperts": 1, "SparseAttention": 1}.items() <= layers.items()
    assert built["configured"].keys() == layers.keys()
