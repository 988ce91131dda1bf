"""Writing stages, in several processes where there is enough to do and memory for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import RequestError
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.memory_cap import clear_memory_errors
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.onnx_export import StageExporter, StageFiles, ignore_progress
from engram_trt.export.worker_pool import worker_pool

WORKER_BYTES = 640 << 20
"""Memory a process is given at least; it holds up to 430 MiB, and 530 MiB of data as the system counts it."""

OWN_BYTES = 768 << 20
"""Memory this process is counted with while others write: its own 430 MiB, and what traced the graphs."""

TRACER_BYTES = 448 << 20
"""The same of a process that traces graphs."""

WORTH_A_POOL = 2 << 30
"""Bytes below which starting processes takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """How stages are written.

    Memory is what processes hold for themselves, as `memory_cap` counts it: pages of mapped shards come on top, up to
    `PAGES_KEPT_BYTES` a process, and go when the system needs them.

    Attributes:
        jobs: processes at a time; None for one per core.
        memory_bytes: for all of them together. Their number follows from it, and each is held to its share by the
            system. A process that writes alone is held to all of it by the command `export`, not by this package's
            functions, whose caller has memory of his own.
    """

    jobs: int | None = None
    memory_bytes: int = OWN_BYTES + 2 * WORKER_BYTES

    def __post_init__(self) -> None:
        if self.memory_bytes < WORKER_BYTES:
            raise RequestError(
                "--max-memory",
                found=f"{self.memory_bytes / 2**30:.2f} GiB",
                expected=f"{WORKER_BYTES / 2**30:.3f} GiB or more, which one process needs",
                remedy="Raise --max-memory; it bounds the processes of an export, however large the checkpoint.",
            )

    def workers(self, num_stages: int, num_bytes: int) -> int:
        """Processes for so many stages and bytes; 1 means none but this one."""
        if num_bytes < WORTH_A_POOL and self.jobs is None:
            return 1
        most = self.jobs or os.cpu_count() or 1
        return max(1, min(most, num_stages, (self.memory_bytes - OWN_BYTES) // WORKER_BYTES))

    def tracers(self) -> int:
        """Processes that may trace graphs at a time."""
        return max(1, min(os.cpu_count() or 1, (self.memory_bytes - OWN_BYTES) // TRACER_BYTES))

    def share(self, workers: int) -> int:
        """Bytes that each of several processes may hold."""
        return (self.memory_bytes - OWN_BYTES) // workers


PAGES_KEPT_BYTES = 256 << 20
"""Weights written before the pages they were read from are given back."""

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
