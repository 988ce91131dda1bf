"""Trace the kinds of stages in processes of their own: tracing is pure Python and takes seconds a kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import onnx
import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter, completed_graph, traced_graph
from engram_trt.export.passes.functions import FunctionLibrary, make_function
from engram_trt.export.stages.chain import DTYPE_NAMES
from engram_trt.export.worker_pool import worker_pool
from engram_trt.plugins.onnx_functions import NodeVariant

FEW_KINDS = 2

Trace = tuple[Mapping[str, Any], ComputeConfig, Any, Mapping[str, Any]]


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
    # The largest graphs first: they decide when the last worker ends, and they bring most of the ops.
    ordered = sorted(kinds.values(), key=lambda spec: -len(spec.inputs))
    with worker_pool(workers, preload=__name__) as pool:
        for spec, model in _graphs(pool, exporter, ordered):
            exporter.add_graph(spec, model)
            progress(spec.kind)


def _graphs(
    pool: ProcessPoolExecutor, exporter: StageExporter, specs: Sequence[StageSpec]
) -> Iterator[tuple[StageSpec, onnx.ModelProto]]:
    """Graphs in the order they are done. A body that several of them need is made by one worker, once."""
    library = FunctionLibrary(exporter.config, DTYPE_NAMES[exporter.compute.dtype])
    token_map = None if exporter.token_map is None else exporter.token_map.numpy()
    config = exporter.config.to_flat_dict()
    traces = {pool.submit(_trace, (config, exporter.compute, token_map, spec.to_json())): spec for spec in specs}
    bodies: dict[Future[bytes], NodeVariant] = {}
    incomplete: list[tuple[StageSpec, onnx.ModelProto]] = []
    running: set[Future[bytes]] = set(traces)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            if future in bodies:
                library.add(bodies[future], onnx.FunctionProto.FromString(future.result()))
                continue
            model = onnx.load_from_string(future.result())
            incomplete.append((traces[future], model))
            for variant in library.missing(model):
                if variant not in bodies.values():
                    body = pool.submit(_make_body, variant)
                    bodies[body] = variant
                    running.add(body)
        waiting, incomplete = incomplete, []
        for spec, model in waiting:
            if library.missing(model):
                incomplete.append((spec, model))
            else:
                yield spec, completed_graph(model, library)


def _trace(job: Trace) -> bytes:
    config, compute, token_map, spec = job
    ids: Tensor | None = None if token_map is None else torch.from_numpy(token_map)
    model = traced_graph(StageSpec.from_json(spec), ModelConfig.from_dict(config), compute, ids)
    serialized: bytes = model.SerializeToString()
    return serialized


def _make_body(variant: NodeVariant) -> bytes:
    serialized: bytes = make_function(variant).SerializeToString()
    return serialized
