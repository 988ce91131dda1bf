"""How many processes an export may have, and what each of them may hold."""

from __future__ import annotations

import os
from dataclasses import dataclass

from engram_trt.configs.errors import RequestError

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
