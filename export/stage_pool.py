"""Writing stages, in several processes where there is enough to do and memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import onnx
import torch

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.memory_cap import clear_memory_errors
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter, StageFiles, ignore_progress
from engram_trt.export.worker_pool import worker_pool
from engram_trt.export.write_limits import PAGES_KEPT_BYTES, WriteLimits

Job = tuple[str, tuple[int, ...] | None, Mapping[str, Any], bytes, ComputeConfig, Any, str, bool, int]


def write_stages(
    exporter: StageExporter,
    checkpoint: Checkpoint,
    layers: tuple[int, ...] | None,
    specs: Sequence[StageSpec],
    folder: Path,
    limits: WriteLimits,
    progress: Callable[[int], None],
    *,
    zeros: bool,
) -> Iterator[tuple[StageSpec, StageFiles]]:
    """Write the files of stages whose graphs are there; each is yielded when it is complete.

    Args:
        exporter: has the graphs.
        checkpoint, layers: has the weights, and the layers it was opened with.
        specs: the stages.
        folder: for the files.
        limits: how many processes.
        progress: called with the number of weight bytes just written.
        zeros: data files of zeros.

    Raises:
        CheckpointError: a weight is damaged, or its shard changed.
        RequestError: a process reached its memory limit.
        UserError: a process was killed.
        OSError: the disk refuses.
    """
    num_bytes = 0 if zeros else sum(w.num_bytes for spec in specs for w in exporter.weights(spec).values())
    workers = limits.workers(len(specs), num_bytes)
    if workers == 1:
        for spec in specs:
            yield spec, write_stage(exporter, checkpoint, spec, folder, progress, zeros=zeros)
        return
    token_map = None if exporter.token_map is None else exporter.token_map.numpy()
    place = (str(checkpoint.root), layers)
    share = limits.share(workers)
    with worker_pool(workers, memory_bytes=share) as pool:
        futures = {}
        for spec in specs:
            graph = exporter.graph(spec).SerializeToString()
            job: Job = (*place, spec.to_json(), graph, exporter.compute, token_map, str(folder), zeros, share)
            futures[pool.submit(_write, job)] = spec
        for future in as_completed(futures):
            files = future.result()
            progress(files.data.stat().st_size)
            yield futures[future], files


_sources: dict[str, CheckpointSource] = {}
"""Checkpoints a worker has opened."""


def _write(job: Job) -> StageFiles:
    with clear_memory_errors(job[-1]):
        return _write_in_worker(job)


def _write_in_worker(job: Job) -> StageFiles:
    root, layers, spec_document, graph, compute, token_map, folder, zeros, _ = job
    if root not in _sources:
        _sources[root] = CheckpointSource(checkpoint=Checkpoint.open(root, layers=layers))
    ids = None if token_map is None else torch.from_numpy(token_map)
    exporter = StageExporter(_sources[root], compute, ids)
    spec = StageSpec.from_json(spec_document)
    exporter.add_graph(spec, onnx.load_from_string(graph))
    return write_stage(exporter, _sources[root].checkpoint, spec, Path(folder), ignore_progress, zeros=zeros)


def write_stage(
    exporter: StageExporter,
    checkpoint: Checkpoint,
    spec: StageSpec,
    folder: Path,
    progress: Callable[[int], None],
    *,
    zeros: bool,
) -> StageFiles:
    """Write one stage; pages of the checkpoint are given back on the way, and it must not change meanwhile.

    Raises:
        CheckpointError, OSError: as `write_stages`.
    """
    since_last = 0

    def written(num_bytes: int) -> None:
        nonlocal since_last
        since_last += num_bytes
        if since_last >= PAGES_KEPT_BYTES:
            exporter.drop_pages()
            since_last = 0
        progress(num_bytes)

    files = exporter.write(spec, folder, zeros=zeros, progress=written)
    exporter.drop_pages()
    if not zeros:
        checkpoint.require_unchanged(exporter.stored_names(spec))
    return files
