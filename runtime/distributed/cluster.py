"""Meeting the other ranks through `torch.distributed`, and leaving them: in order, or at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

from engram_trt.configs.errors import BackendError, ClusterError, PeerError, UserError
from engram_trt.runtime.distributed.expert_lane import AllToAll
from engram_trt.runtime.distributed.mail import Transport
from engram_trt.runtime.distributed.ranks import Rank
from engram_trt.runtime.distributed.torch_transport import NcclTransport, TorchAllToAll, TorchTransport, nccl_place
from engram_trt.runtime.distributed.watch import GRACE_SECONDS, Watch
from engram_trt.runtime.stage_runners.contract import Backend
from engram_trt.runtime.stage_runners.device_backend import DeviceBackend

MEETING_SECONDS = 60
"""How long ranks wait for each other at the start."""
WAIT_SECONDS = 1e8
"""Of the process group: a session may be idle for long; what is lost is found by the heartbeat."""
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 130, 141, 143
POLL_SECONDS = 0.05


class Cluster:
    """This process among its ranks. A context: leaving it tells the others why.

    Args:
        rank: which one this is.
        command: for messages, such as `engram-trt generate`.

    Raises:
        BackendError: torch is missing.
        ClusterError: the meeting port is taken.
        PeerError: some rank did not come.
    """

    def __init__(self, rank: Rank, command: str) -> None:
        self.rank, self._command = rank, command
        self._exit_code: int | None = None
        self._watching: Watch | None = None
        _hold_signals(rank)
        threading.Thread(target=self._await_termination, name="signals", daemon=True).start()
        self._torch = _import_torch()
        # The library's own limit is tried several times over, and may be minutes.
        deadline = threading.Timer(MEETING_SECONDS, self._leave_now, [_absent(rank, TimeoutError("no answer"))])
        deadline.daemon = True
        deadline.start()
        self._store = self._meet()
        try:
            self.watch = Watch(self._store.clone(), rank.number, rank.world_size, self._leave_now)
            self.watch.start()
        except RuntimeError as error:
            raise _absent(rank, error) from None
        deadline.cancel()
        self._watching = self.watch

    # --- notes on the launcher's store --------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Write a note for other ranks."""
        with self._knowing_why():
            self._store.set(key, text)

    def notes(self, key: str) -> dict[int, str]:
        """The note of every rank under `key/RANK`; waits for all, and raises what happens meanwhile."""
        keys = [f"{key}/{number}" for number in range(self.rank.world_size)]
        values = self._await(keys)
        return dict(enumerate(values))

    def note(self, key: str) -> str:
        """One note; waits for it, and raises what happens meanwhile."""
        return self._await([key])[0]

    def _await(self, keys: list[str]) -> list[str]:
        with self._knowing_why():
            while not self._store.check(keys):
                self.watch.check()
                threading.Event().wait(POLL_SECONDS)
            self.watch.check()
            return [value.decode() for value in self._store.multi_get(keys)]

    @contextmanager
    def _knowing_why(self) -> Iterator[None]:
        """A call of the library that fails because a rank is lost raises that in its place."""
        try:
            yield
        except RuntimeError as error:
            self.watch.raise_broken(error)

    # --- tensors ------------------------------------------------------------------------------------------

    def transport(self, backend: Backend) -> Transport:
        """Connect to the neighbours: from GPU to GPU where every rank has one of its own and can, else by the host.

        Args:
            backend: of this rank.
        """
        distributed, rank = self._torch.distributed, self.rank
        if rank.address.partition(":")[0] in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._knowing_why():
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore("ranks", self._store),
                rank=rank.number,
                world_size=rank.world_size,
                timeout=timedelta(seconds=WAIT_SECONDS),
            )
        neighbours = (rank.number + 1) % rank.world_size, (rank.number - 1) % rank.world_size
        own = nccl_place(self._torch, backend)
        self.post(f"nccl/{rank.number}", own)
        places = list(self.notes("nccl").values())
        if not isinstance(backend, DeviceBackend) or "" in places or len(set(places)) < len(places):
            return TorchTransport(self._torch, *neighbours, self.watch)
        edges = [self._group((sender, (sender + 1) % rank.world_size), "nccl") for sender in range(rank.world_size)]
        ends = edges[rank.number], edges[rank.number - 1]
        return NcclTransport(self._torch, *neighbours, self.watch, backend, *ends)

    def _group(self, members: tuple[int, ...], kind: str) -> Any:
        with self._knowing_why():
            return self._torch.distributed.new_group(
                sorted(members), backend=kind, timeout=timedelta(seconds=WAIT_SECONDS)
            )

    def lane(self, members: tuple[int, ...]) -> AllToAll | None:
        """Connect some ranks for all-to-all; None where this rank is not among them. All ranks call it alike."""
        group = self._group(members, "gloo")
        return TorchAllToAll(self._torch, group, members, self.watch) if self.rank.number in members else None

    # --- the end ------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.watch.leaving()
        self._exit_code = 0 if error is None else _exit_code(error)
        if error is not None and not isinstance(error, PeerError):
            self._tell(error)
        if error is None:
            self.watch.finish()
        if self.rank.number == 0 and not isinstance(error, PeerError):
            # The store may live in this process: it must outlive the others, who read there what to do.
            self._await_others(30.0 if error is None else 3 * GRACE_SECONDS)
        _leave_at_exit(self._exit_code)

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | BrokenPipeError):
            self.watch.tell("interrupted", "a user who has seen enough")
        elif isinstance(error, UserError):
            self.watch.tell("refused", str(error))
        else:
            self.watch.tell("failed", f"{type(error).__name__}: {error}"[:500])

    def _await_others(self, seconds: float) -> None:
        for _ in range(int(seconds / POLL_SECONDS)):
            if self.watch.all_finished():
                return
            threading.Event().wait(POLL_SECONDS)

    def _leave_now(self, failure: PeerError) -> None:
        """The program did not leave: it may hang in a call that nothing can interrupt."""
        if self.rank.number == 0 or failure.kind in ("lost", "failed"):
            print(f"{self._command}: {failure}", file=sys.stderr)
        _flush()
        os._exit(failure.exit_code)

    def _await_termination(self) -> None:
        while True:
            signal.sigwait({signal.SIGTERM})
            if self._watching is None:  # the ranks have not met: nobody is to be named, nothing to be undone
                os._exit(EXIT_TERMINATED)
            self._watching.terminate()

    def _meet(self) -> Any:
        distributed = self._torch.distributed
        try:
            store, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(seconds=5 * MEETING_SECONDS)))
            store.set_timeout(timedelta(seconds=MEETING_SECONDS))
            return store
        except (RuntimeError, ValueError) as error:
            text = str(error)
            if "EADDRINUSE" in text or "address already in use" in text.lower():
                raise ClusterError(
                    f"rank {self.rank.number}: MASTER_PORT",
                    found=f"{self.rank.address}, which is in use",
                    expected="a free port for the ranks to meet",
                    remedy="Choose another port (`torchrun --master-port`), or end what listens there.",
                ) from None
            raise _absent(self.rank, error) from None


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _hold_signals(rank: Rank) -> None:
    """SIGTERM goes to a thread of its own, for the main one may be inside a call; Ctrl-C is rank 0's affair."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if rank.number:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_at_exit(code: int) -> None:
    """End without the interpreter's own end: threads inside the process group would be waited for, for ever."""
    import atexit

    def leave() -> None:
        _flush()
        os._exit(code)

    atexit.register(leave)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _import_torch() -> Any:
    # The library would print stacks of its own about every connection that a lost rank leaves.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise BackendError(
            "several processes",
            found="no package torch",
            expected="torch, for torch.distributed",
            remedy="pip install 'engram-trt[export]'",
        ) from None
    return torch


def _absent(rank: Rank, error: Exception) -> PeerError:
    return PeerError(
        f"rank {rank.number}: {rank.address}",
        kind="lost",
        found=f"not all of {rank.world_size} ranks within {MEETING_SECONDS} s ({str(error).splitlines()[0][:120]})",
        expected="every rank at the meeting place",
        remedy="Start all ranks, with the same address and port.",
    )
