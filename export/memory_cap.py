"""A memory limit on a process that the system itself keeps.

What is limited is the data of a process (RLIMIT_DATA): private memory that may be written to, which no other process
shares. Pages of shards and libraries, mapped for reading, do not count: the system takes them back when it needs them.
A limit on address space would count them, and a control group needs rights that a user seldom has.

Data also counts what is set aside and never touched, mostly stacks of threads that a library starts, one per core.
That is measured when the limit is set, and allowed on top. Measured on the released shapes, with torch and onnx
imported: 300 MiB of data of which 225 MiB are touched; while a stage is written 405 MiB (530 MiB where all 96,085
tensors are listed), of which 320 (430) are touched. Freed memory that the allocator keeps is the difference.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.errors import RequestError

MIB = 1 << 20
_STACK_BYTES = 8 * MIB
_OWN_BYTES = 400 * MIB
"""Of what a process holds already so much counts at most: a larger one is a program that calls this package."""
_REFUSALS = ("allocate memory", "bad_alloc", "not enough memory", "can't start new thread", "out of memory")


def data_bytes() -> tuple[int, int]:
    """Data of this process, and the part of it that is in memory."""
    status = Path("/proc/self/status").read_text()
    sizes = dict(re.findall(r"^(VmData|RssAnon):\s+(\d+)", status, re.MULTILINE))
    return int(sizes["VmData"]) << 10, int(sizes["RssAnon"]) << 10


def limit_data(num_bytes: int, num_threads: int) -> int | None:
    """Let this process hold so much and no more; allocations beyond fail.

    Args:
        num_bytes: of memory in use. A fresh process with its libraries counts, up to `_OWN_BYTES`.
        num_threads: that may still be started; their stacks are set aside and not used.

    Returns:
        the limit before, for `restore_data_limit`; None where the system has no such limit.
    """
    if sys.platform != "linux":
        return None
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    data, touched = data_bytes()
    limit = data + num_bytes - min(touched, _OWN_BYTES) + num_threads * _STACK_BYTES
    for other in (before, most):
        limit = limit if other == resource.RLIM_INFINITY else min(limit, other)
    resource.setrlimit(resource.RLIMIT_DATA, (max(limit, 0), most))
    return before


def restore_data_limit(before: int | None) -> None:
    """Undo `limit_data`."""
    if before is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@contextmanager
def capped_memory(num_bytes: int, num_threads: int) -> Iterator[None]:
    """Hold this process to a limit for the block.

    Raises:
        RequestError: the block needed more.
    """
    before = limit_data(num_bytes, num_threads)
    try:
        with clear_memory_errors(num_bytes):
            yield
    finally:
        restore_data_limit(before)


@contextmanager
def clear_memory_errors(num_bytes: int) -> Iterator[None]:
    """Turn a refused allocation into one clear error.

    Args:
        num_bytes: the limit, for the message.

    Raises:
        RequestError: the system refused memory, however Python, numpy or torch put it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error).lower() for text in _REFUSALS):
            raise
        raise too_little_memory(num_bytes) from error


def too_little_memory(num_bytes: int) -> RequestError:
    """What the user is told, wherever it was noticed."""
    return RequestError(
        "--max-memory",
        found=f"a process that needs more than its {num_bytes / MIB:,.0f} MiB",
        expected="work that fits the limit",
        remedy="Raise --max-memory or lower --jobs; what is finished is kept, and the same command goes on.",
    )
