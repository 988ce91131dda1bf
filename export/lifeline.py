"""A process that lives no longer than the one that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import wait
from threading import Thread

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, also when that is killed and cannot clean up.

    The system does it where it can. A worker of `multiprocessing` also watches a pipe whose other end its command
    alone holds: where workers are forks of a server, the server is the parent, and lives as long as they do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    command = multiprocessing.parent_process()
    if command is not None:
        Thread(target=_end_after, args=(command.sentinel,), name="lifeline", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
