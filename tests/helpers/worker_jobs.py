"""Jobs for worker processes, and a command that is about to be killed while its workers are at work."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from engram_trt.configs.errors import CheckpointError
from engram_trt.export.memory_cap import clear_memory_errors
from engram_trt.export.worker_pool import worker_pool

CAP_BYTES = 400 << 20


def hold(num_bytes: int) -> int:
    """Take so much memory and touch its end."""
    with clear_memory_errors(CAP_BYTES):
        return int(torch.ones(num_bytes, dtype=torch.uint8)[-1])


def map_read_only(path: str) -> int:
    """Map a file far larger than the limit, and read its end."""
    import numpy as np

    with clear_memory_errors(CAP_BYTES):
        return int(np.memmap(path, dtype=np.uint8, mode="r")[-1])


def complain() -> None:
    """Raise what a damaged checkpoint raises."""
    raise CheckpointError("shard", found="a NaN", expected="none", remedy="Fetch it again.")


def vanish() -> None:
    """End like a process that the system kills."""
    os._exit(9)


def report_and_wait(folder: str, number: int) -> None:
    """Leave this process's id and be busy."""
    (Path(folder) / f"{number}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def main(folder: str, preload: str | None) -> None:
    """Two busy workers until somebody ends this process."""
    with worker_pool(2, preload=preload) as pool:
        for job in [pool.submit(report_and_wait, folder, number) for number in range(2)]:
            job.result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
