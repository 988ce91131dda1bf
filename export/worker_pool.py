"""Worker processes of a long job: one thread each, held to their memory, and gone when the command is gone."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import torch

from engram_trt.configs.errors import UserError
from engram_trt.export.lifeline import end_with_parent
from engram_trt.export.memory_cap import limit_data


@contextmanager
def worker_pool(
    workers: int, *, preload: str | None = None, memory_bytes: int | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Processes that take jobs; when the block ends with an error they are ended, whatever they are doing.

    Args:
        workers: how many.
        preload: workers are forks of one process that has imported this module and started no thread; None starts
            each anew.
        memory_bytes: that each may hold.

    Raises:
        UserError: a worker ended without a word. Errors that a job raises come out of its future.
    """
    context = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload([preload])
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(memory_bytes,))
    try:
        yield pool
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise _ended(memory_bytes) from error
        raise
    pool.shutdown()


def _begin(memory_bytes: int | None) -> None:
    end_with_parent()
    # An interrupt is the command's to see; it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if memory_bytes is not None:
        limit_data(memory_bytes, num_threads=1)


def _ended(memory_bytes: int | None) -> UserError:
    limit = "" if memory_bytes is None else f" of {memory_bytes / 2**20:,.0f} MiB at most"
    return UserError(
        "a worker process",
        found="an end without a word: it was killed, or the machine has no memory left",
        expected=f"a process{limit} that ends its work",
        remedy="Use fewer --jobs or free some memory; what is finished is kept, and the same command goes on.",
    )
