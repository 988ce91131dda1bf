"""Trace the kinds of stages in processes of their own: tracing is pure Python and takes seconds a kind."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import onnx
import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter, stage_graph
from engram_trt.export.passes.functions import FunctionLibrary
from engram_trt.export.stages.chain import DTYPE_NAMES

FEW_KINDS = 2

Job = tuple[Mapping[str, Any], ComputeConfig, Any, Mapping[str, Any]]

_libraries: dict[tuple[str, torch.dtype], FunctionLibrary] = {}
"""Function bodies a worker has made so far."""


def trace_kinds(
    exporter: StageExporter, specs: Sequence[StageSpec], progress: Callable[[str], None], max_workers: int | None = None
) -> None:
    """Make the graphs of all kinds that occur in `specs` and hand them to the exporter.

    Args:
        exporter: receives the graphs.
        specs: stages about to be exported.
        progress: called with a kind when its graph is there.
        max_workers: processes; the number of cores by default, none for a few kinds: starting one takes as long
            as tracing one.
    """
    kinds = {spec.kind: spec for spec in specs if not exporter.has_graph(spec)}
    workers = min(max_workers or os.cpu_count() or 1, len(kinds))
    if workers <= 1 or len(kinds) <= FEW_KINDS:
        for kind, spec in kinds.items():
            exporter.graph(spec)
            progress(kind)
        return
    # The largest graphs first: they decide when the last worker ends.
    ordered = sorted(kinds.values(), key=lambda spec: -len(spec.inputs))
    token_map = None if exporter.token_map is None else exporter.token_map.numpy()
    config = exporter.config.to_flat_dict()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        jobs: list[Job] = [(config, exporter.compute, token_map, spec.to_json()) for spec in ordered]
        for spec, serialized in zip(ordered, pool.map(_trace, jobs), strict=True):
            exporter.add_graph(spec, onnx.load_from_string(serialized))
            progress(spec.kind)


def _trace(job: Job) -> bytes:
    config_values, compute, token_map, spec = job
    torch.set_num_threads(1)
    config = ModelConfig.from_dict(config_values)
    key = (config.digest(), compute.dtype)
    library = _libraries.setdefault(key, FunctionLibrary(config, DTYPE_NAMES[compute.dtype]))
    ids: Tensor | None = None if token_map is None else torch.from_numpy(token_map)
    serialized: bytes = stage_graph(StageSpec.from_json(spec), config, compute, ids, library).SerializeToString()
    return serialized
