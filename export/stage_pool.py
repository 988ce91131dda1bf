"""Writing stages, in several processes where there is enough to do and memory for them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter, StageFiles, ignore_progress

WORKER_BYTES = 1 << 30
"""Memory one process is counted with: torch and onnx imported, a graph, the pages of the weights in hand."""

WORTH_A_POOL = 2 << 30
"""Bytes below which starting processes takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """How stages are written.

    Attributes:
        jobs: processes at a time; None for one per core.
        memory_bytes: for all of them together.
    """

    jobs: int | None = None
    memory_bytes: int = 2 * WORKER_BYTES

    def workers(self, num_stages: int, num_bytes: int) -> int:
        """Processes for so many stages and bytes; 1 means none but this one."""
        if num_bytes < WORTH_A_POOL and self.jobs is None:
            return 1
        most = self.jobs or os.cpu_count() or 1
        return max(1, min(most, num_stages, self.memory_bytes // WORKER_BYTES))


PAGES_KEPT_BYTES = 256 << 20
"""Weights written before the pages they were read from are given back."""

Job = tuple[str, tuple[int, ...] | None, Mapping[str, Any], bytes, ComputeConfig, Any, str, bool]


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
    with ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {}
        for spec in specs:
            graph = exporter.graph(spec).SerializeToString()
            job: Job = (*place, spec.to_json(), graph, exporter.compute, token_map, str(folder), zeros)
            futures[pool.submit(_write, job)] = spec
        try:
            for future in as_completed(futures):
                files = future.result()
                progress(files.data.stat().st_size)
                yield futures[future], files
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_sources: dict[str, CheckpointSource] = {}
"""Checkpoints a worker has opened."""


def _write(job: Job) -> StageFiles:
    root, layers, spec_document, graph, compute, token_map, folder, zeros = job
    torch.set_num_threads(1)
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
