"""Run one process under a memory and a time limit, and say what became of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_POLL_SECONDS = 0.05
_KIB = 1024

Outcome = Literal["ended", "memory", "time", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may use."""

    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a process ended.

    Attributes:
        outcome: by itself, or killed for its memory, its time, or because another failed.
        code: exit status; negative for a signal.
        peak_bytes: largest resident memory seen.
        seconds: wall time.
    """

    outcome: Outcome
    code: int
    peak_bytes: int
    seconds: float


def run_limited(
    module: str,
    arguments: Sequence[str],
    output: Path,
    limits: Limits,
    environment: Mapping[str, str],
    stopped: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run `python -m module` and wait for it.

    Args:
        module: to run.
        arguments: its command line.
        output: file that standard output and error are appended to.
        limits: beyond which it is killed. Memory is watched, not capped by the kernel: a GPU driver reserves
            address space far beyond what it uses.
        environment: added to this process's own.
        stopped: asked while waiting; True ends the process early.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", module, *arguments]
    with output.open("ab") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **environment}
        )
    peak = 0
    outcome: Outcome = "ended"
    try:
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            if peak > limits.memory_bytes:
                outcome = "memory"
            elif time.monotonic() - started > limits.seconds:
                outcome = "time"
            elif stopped():
                outcome = "stopped"
            if outcome != "ended":
                break
            time.sleep(_POLL_SECONDS)
    finally:
        # Also when an interrupt ends the wait: no builder outlives the command.
        if process.poll() is None:
            process.kill()
        code = process.wait()
    return Finished(outcome=outcome, code=code, peak_bytes=peak, seconds=time.monotonic() - started)


def _resident_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    except OSError:
        return 0
    return 0
