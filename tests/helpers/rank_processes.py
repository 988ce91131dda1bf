"""Ranks as processes, started as a launcher would start them, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PROGRAM = str(Path(sys.executable).with_name("engram-trt"))
PATIENCE = 120.0
"""For a busy machine; a process that takes longer hangs."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Ended:
    """One rank after its end; seconds since `Ranks.mark`, for messages."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Ranks:
    """Processes of one launch.

    Args:
        calls: arguments of each rank.
        port: where they meet.
    """

    calls: Sequence[Sequence[object]]
    port: int = field(default_factory=free_port)

    def __enter__(self) -> Ranks:
        size = len(self.calls)
        self.processes = []
        for rank, call in enumerate(self.calls):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in {**place, **meeting}.items()}}
            self.processes.append(
                subprocess.Popen(
                    [PROGRAM, *map(str, call)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    preexec_fn=_heed_ctrl_c,
                )
            )
        self.mark()
        return self

    def mark(self) -> None:
        """Time counts from here."""
        self._since = time.monotonic()

    def await_output(self, num_bytes: int = 1) -> None:
        """Wait until rank 0 has printed something."""
        stream = self.processes[0].stdout
        assert stream is not None
        if len(stream.read(num_bytes)) < num_bytes:
            raise AssertionError(f"rank 0 ended without an answer: {self.end()}")

    def end(self) -> list[Ended]:
        """Wait for all; AssertionError for one that hangs."""
        found = []
        for rank, process in enumerate(self.processes):
            try:
                out, err = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs") from None
            seconds = time.monotonic() - self._since
            found.append(Ended(process.returncode, out.decode(errors="replace"), err.decode(), seconds))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _heed_ctrl_c() -> None:
    """A test run in the background of a shell ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
