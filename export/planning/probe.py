"""What this machine can do: memory copy, random reads of its disk, and a GPU's copy where there is one."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import BinaryIO

import numpy as np

from engram_trt.configs.errors import BackendError
from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.engram.memory import available_memory

COPY_BYTES = 128 << 20
PRODUCT_SIZE = 1024
READS = 512
PAGE = 4096
_SCRATCH_BYTES = 64 << 20
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measured rates, per second; None where there is nothing to measure."""

    memory: int
    operations: int
    disk_reads: int
    gpu_memory_rate: int | None
    host_memory: int
    disk: int


def probe(folder: Path) -> Probe:
    """Measure; takes a second or two.

    Args:
        folder: whose disk is read; the largest weight file in it, or a scratch file.
    """
    return Probe(
        memory=_memory_rate(),
        operations=_operation_rate(),
        disk_reads=_disk_reads(folder),
        gpu_memory_rate=_gpu_rate(),
        host_memory=available_memory(),
        disk=shutil.disk_usage(folder).free,
    )


def _best(seconds: list[float]) -> float:
    return max(min(seconds), 1e-9)


def _memory_rate() -> int:
    """Bytes read a second in a copy: half of what it moves."""
    source, target = np.ones(COPY_BYTES, dtype=np.uint8), np.zeros(COPY_BYTES, dtype=np.uint8)
    times = []
    for _ in range(_REPEATS):
        started = perf_counter()
        np.copyto(target, source)
        times.append(perf_counter() - started)
    return int(COPY_BYTES / _best(times))


def _operation_rate() -> int:
    """float32 multiplications and additions a second in a matrix product."""
    matrix = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    times = []
    for _ in range(_REPEATS):
        started = perf_counter()
        matrix @ matrix
        times.append(perf_counter() - started)
    return int(2 * PRODUCT_SIZE**3 / _best(times))


def _disk_reads(folder: Path) -> int:
    """Pages read a second, one after the other, past the page cache as far as the system lets us."""
    with _some_file(folder) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        places = [random.Random(0).randrange(max(size // PAGE, 1)) * PAGE for _ in range(READS)]
        for place in places:
            os.posix_fadvise(file.fileno(), place, PAGE, os.POSIX_FADV_DONTNEED)
        started = perf_counter()
        for place in places:
            os.pread(file.fileno(), PAGE, place)
        return int(READS / _best([perf_counter() - started]))


@contextmanager
def _some_file(folder: Path) -> Iterator[BinaryIO]:
    shards = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if shards:
        with shards[-1].open("rb") as file:
            yield file
        return
    with TemporaryFile() as scratch:
        scratch.write(bytes(_SCRATCH_BYTES))
        scratch.flush()
        os.fsync(scratch.fileno())
        yield scratch


def _gpu_rate() -> int | None:
    """Bytes read a second in a copy within the GPU's memory; None without one."""
    try:
        driver = CudaDriver.open()
    except BackendError:
        return None
    first, second = (driver.allocate(COPY_BYTES, "probe") for _ in range(2))
    stream = driver.create_stream()
    try:
        with driver.guard():
            times = []
            for _ in range(_REPEATS):
                started = perf_counter()
                driver.api.cuMemcpyDtoDAsync(second, first, COPY_BYTES, stream)
                driver.synchronize(stream)
                times.append(perf_counter() - started)
    finally:
        driver.destroy_stream(stream)
        driver.free(first)
        driver.free(second)
    return int(COPY_BYTES / _best(times))
