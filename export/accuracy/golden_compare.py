"""Plan a comparison, run its jobs in processes, and gather one report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path

from engram_trt.export.accuracy.golden_folder import GoldenFolder, Job, modes_of
from engram_trt.export.accuracy.golden_hash import FILES as HASH_FILES
from engram_trt.export.accuracy.golden_hash import HOST, compare_constants, compare_hash
from engram_trt.export.accuracy.golden_models import compare_model, note_unrun_model_files
from engram_trt.export.accuracy.golden_ops import COMPARISONS, compare_op, op_file
from engram_trt.export.accuracy.golden_report import Report
from engram_trt.export.accuracy.golden_results import NotRun, Results
from engram_trt.export.worker_pool import worker_pool

BACKENDS = ("torch", "onnxruntime")
UNKNOWN_FILE = "a file this version does not know"
_COST = {"hash": 20.0, "op": 10.0, "model": 20.0}
_ONNX_FACTOR = 4.0
"""Tracing makes ONNX Runtime's jobs the long ones."""


def run_job(path: Path, job: Job, progress: Callable[[str], None]) -> Results:
    """Do one job here; UserError for a folder that does not fit together."""
    folder = GoldenFolder.open(path)
    if job.kind == "hash":
        return compare_constants(folder) if job.backend == HOST else compare_hash(folder, job.backend)
    if job.kind == "op":
        return compare_op(folder, job.name, job.backend)
    return compare_model(folder, job.name, job.mode, job.backend, progress)


def plan(folder: GoldenFolder, backends: Sequence[str]) -> tuple[list[Job], Results]:
    """Jobs for everything the folder has, the longest first, and what no job takes.

    Args:
        folder: the golden folder.
        backends: some of `BACKENDS`.
    """
    jobs: list[Job] = []
    if any(file in HASH_FILES for file in folder.tensor_files):
        jobs.append(Job(kind="hash", name="constants", backend=HOST, cost=_COST["hash"]))
    for backend in backends:
        factor = _ONNX_FACTOR if backend != "torch" else 1.0
        if any(file in HASH_FILES for file in folder.tensor_files):
            jobs.append(Job(kind="hash", name="rows", backend=backend, cost=factor * _COST["hash"]))
        ops = [name for name in COMPARISONS if folder.has(op_file(name))]
        jobs += [Job(kind="op", name=name, backend=backend, cost=factor * _COST["op"]) for name in ops]
        for name in folder.model_names():
            cost = factor * _COST["model"] * (1 + _num_bytes(folder, f"model/{name}/") / 2**20)
            jobs += [
                Job(kind="model", name=name, mode=mode, backend=backend, cost=cost)
                for mode in modes_of(folder, name)
                if backend == "torch" or not mode.startswith("bf16")
            ]
    return sorted(jobs, key=lambda job: (-job.cost, str(job))), _unplanned(folder, tuple(backends))


def _num_bytes(folder: GoldenFolder, prefix: str) -> int:
    return sum((folder.path / file).stat().st_size for file in folder.tensor_files if file.startswith(prefix))


def _unplanned(folder: GoldenFolder, backends: tuple[str, ...]) -> Results:
    """Files that no job reads, each with the reason."""
    results = Results()
    models = folder.model_names()
    for name in models:
        note_unrun_model_files(folder, name, backends, results)
        _note_unused_inputs(folder, name, results)
    known = {*HASH_FILES, *(op_file(name) for name in COMPARISONS)}
    for file in folder.tensor_files:
        of_model = file.count("/") == 2 and file.startswith("model/")
        if file not in known and not of_model:
            results.not_run.append(NotRun(file=file, backend="-", what="", reason=UNKNOWN_FILE))
    return results


def _note_unused_inputs(folder: GoldenFolder, name: str, results: Results) -> None:
    """Inputs and weights are read with a mode's vectors; list them where there is no such mode."""
    modes = modes_of(folder, name)
    quantised = any(mode.endswith("_q") for mode in modes)
    needed = {"inputs": bool(modes), "weights": bool(modes), "weights_q_overlay": quantised}
    prefix = f"model/{name}/"
    for file in (file for file in folder.tensor_files if file.startswith(prefix)):
        stem = file.removeprefix(prefix).removesuffix(".safetensors")
        if "." in stem:
            continue
        if stem not in needed:
            results.not_run.append(NotRun(file=file, backend="-", what="", reason=UNKNOWN_FILE))
        elif not needed[stem]:
            reason = "no vectors of a mode that takes it"
            results.not_run.append(NotRun(file=file, backend="-", what="", reason=reason))


def compare_folder(
    path: Path,
    backends: Sequence[str],
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    max_workers: int | None = None,
) -> Report:
    """Compare everything a golden folder holds.

    Args:
        path: the folder.
        backends: some of `BACKENDS`.
        progress: told what happens, jobs done, jobs in all.
        max_workers: processes; 1 for none beside this one, the number of cores by default.

    Raises:
        UserError: the folder is none, or is damaged.
    """
    folder = GoldenFolder.open(path)
    progress("checking files", 0, 0)
    folder.check_readable()
    jobs, results = plan(folder, backends)
    folder.check_sums(results)
    workers = min(max_workers or os.cpu_count() or 1, len(jobs))
    outcomes = _here(path, jobs, progress) if workers <= 1 else _in_processes(path, jobs, progress, workers)
    for outcome in outcomes:
        results.extend(outcome)
    _order(results)
    return Report(folder=str(path), backends=tuple(backends), results=results, tensor_files=folder.tensor_files)


def _order(results: Results) -> None:
    """Jobs end in any order; a report does not show it."""
    results.checks.sort(key=lambda check: (check.file, check.backend, check.what, check.tensor, check.found.error))


def _here(path: Path, jobs: Sequence[Job], progress: Callable[[str, int, int], None]) -> Iterator[Results]:
    for done, job in enumerate(jobs):
        progress(str(job), done, len(jobs))

        def detail(text: str, done: int = done) -> None:
            progress(text, done, len(jobs))

        yield run_job(path, job, detail)


def _in_processes(
    path: Path, jobs: Sequence[Job], progress: Callable[[str, int, int], None], workers: int
) -> Iterator[Results]:
    with worker_pool(workers) as pool:
        futures = {pool.submit(_work, path, job): job for job in jobs}
        progress(f"{len(jobs)} comparisons in {workers} processes", 0, len(jobs))
        for done, future in enumerate(as_completed(futures), 1):
            progress(str(futures[future]), done, len(jobs))
            yield future.result()


def _work(path: Path, job: Job) -> Results:
    """A job in a process of its own."""
    return run_job(path, job, lambda text: None)
