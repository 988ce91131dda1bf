"""The memory of this machine: how much is left, where it lies, and whether a GPU may read it directly."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from engram_trt.configs.errors import DeploymentError
from engram_trt.runtime.engram.files import Bytes

MEMORY_RESERVE = 1 << 30
"""Bytes that a table leaves free."""
_NUMA_SAMPLES = 1024
_SYS_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


def require_memory(needed: int, available: int) -> None:
    """Refuse, with both numbers, a table that would not fit; DeploymentError."""
    if needed + MEMORY_RESERVE > available:
        raise DeploymentError(
            "engram.residency = 'host'",
            found=f"{available:,} bytes of memory available",
            expected=f"{needed:,} for the table and {MEMORY_RESERVE:,} to spare",
            remedy="Choose 'mmap' for this table, or give the process more memory.",
        )


def available_memory() -> int:
    """Bytes this process may still use: of the machine, and of the control group it is in."""
    amounts = [_meminfo("MemAvailable")]
    limit, used = (_number(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit is not None and used is not None:
        amounts.append(max(limit - used, 0))
    return min(amounts)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def numa_nodes(memory: Bytes) -> dict[str, int] | None:
    """Where a sample of the pages lies: NUMA node -> pages; None where the system does not say."""
    number = _SYS_MOVE_PAGES.get(platform.machine())
    if number is None or not memory.size:
        return None
    start = memory.ctypes.data // mmap.PAGESIZE
    stop = (memory.ctypes.data + memory.size - 1) // mmap.PAGESIZE
    pages = np.unique(np.linspace(start, stop, num=_NUMA_SAMPLES, dtype=np.int64)) * mmap.PAGESIZE
    status = np.full(pages.size, -1, dtype=np.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (pages, status))
    address, result = pointers
    if libc.syscall(number, 0, ctypes.c_ulong(pages.size), address, None, result, 0) != 0:
        return None
    nodes, counts = np.unique(status[status >= 0], return_counts=True)
    return {str(int(node)): int(count) for node, count in zip(nodes, counts, strict=True)}


def pin(memory: Bytes) -> bool:
    """Pin memory for a GPU, if CUDA's Python bindings and a device are there; whether it was done.

    Not yet run on a machine with a GPU: neither the pinning nor a copy from pinned memory has been measured.
    """
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return False
    from cuda.bindings import runtime as cuda

    error, count = cuda.cudaGetDeviceCount()
    if int(error) != 0 or count == 0:
        return False
    (error,) = cuda.cudaHostRegister(memory.ctypes.data, memory.size, cuda.cudaHostRegisterPortable)
    return int(error) == 0


def unpin(memory: Bytes) -> None:
    """Undo `pin`."""
    from cuda.bindings import runtime as cuda

    cuda.cudaHostUnregister(memory.ctypes.data)
