"""Whether all ranks are alive: a thread that does nothing else, so that a slow step is no stall.

Every rank counts up a key of the launcher's store and reads the others'. On the same host it also watches the other
processes themselves, so that a killed one is known at once. Whoever finds a rank lost writes the verdict down, so that
all ranks tell the same story. A process that was stopped for longer than the limit is lost, also if it goes on later.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from engram_trt.configs.errors import PeerError

BEAT_SECONDS = 0.2
LIMIT_SECONDS = 1.2
"""A heartbeat this old is lost: with the beat and the grace, every rank has stopped within 2 s."""
LOADING_LIMIT_SECONDS = 60.0
"""While stages load, which may keep the interpreter's lock for long."""
GRACE_SECONDS = 0.4
"""What the other threads get to leave in order after a failure; then the process ends."""

NONE, DONE = "-", "done"


class Store(Protocol):
    """The part of torch's store that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Watch:
    """Beats for this rank and listens to the others.

    Args:
        store: with a connection of its own.
        rank, world_size: of this process.
        leave: ends the process with an error if the program does not within the grace; tests replace it.
    """

    def __init__(self, store: Store, rank: int, world_size: int, leave: Callable[[PeerError], None]) -> None:
        self.rank, self.world_size = rank, world_size
        self.failure: PeerError | None = None
        self.limit_seconds = LOADING_LIMIT_SECONDS
        self._store, self._leave = store, leave
        self._others = [other for other in range(world_size) if other != rank]
        self._hooks: list[Callable[[PeerError], None]] = []
        self._is_left, self._is_over, self._is_failed = threading.Event(), threading.Event(), threading.Event()
        self._last_beat = time.monotonic()
        self._terminated_at: float | None = None
        self._suspected: tuple[float, str] | None = None
        self._processes: dict[int, int] = {}
        self._places: dict[int, str] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid(), _start_time(os.getpid())]))
        store.compare_set("verdict", "", NONE)
        store.set(f"beat/{rank}", "0")

    def start(self) -> None:
        """Begin; every rank must have made its `Watch` by now."""
        values = self._store.multi_get([f"process/{other}" for other in self._others])
        for other, value in zip(self._others, values, strict=True):
            host, process, started = json.loads(value)
            self._places[other] = f"process {process} on {host}"
            if host == socket.gethostname() and started is not None and _start_time(process) == started:
                self._processes[os.pidfd_open(process)] = other
        self._last_beat = time.monotonic()
        self._thread.start()

    def on_failure(self, hook: Callable[[PeerError], None]) -> None:
        """Call a function, from the watching thread, when a rank is lost; at once if one is."""
        with self._lock:
            self._hooks.append(hook)
            failure = self.failure
        if failure is not None:
            hook(failure)

    def check(self) -> None:
        """Raise what has happened, if anything has."""
        if self.failure is not None:
            raise self.failure

    def tell(self, kind: str, text: str) -> None:
        """Let all other ranks stop because of this one; the first word counts."""
        with suppress(RuntimeError):  # without a store the others stop by themselves
            self._write_verdict(kind, self.rank, text)

    def suspect(self, error: Exception) -> None:
        """A connection broke: whose fault it is will be known in a moment, or it is the neighbour's."""
        with self._lock:
            self._suspected = self._suspected or (time.monotonic(), f"a broken connection ({_first_line(error)})")

    def raise_broken(self, error: Exception) -> NoReturn:
        """As `suspect`, for a thread that has nothing to do until then: raises what is found out."""
        self.suspect(error)
        self._is_failed.wait(LOADING_LIMIT_SECONDS)
        raise self.failure or error

    def terminate(self) -> None:
        """The launcher told this process to stop, likely because another one died: find out which."""
        self._terminated_at = self._terminated_at or time.monotonic()

    def leaving(self) -> None:
        """The program ends by itself: nothing must be forced any more."""
        self._is_left.set()

    def finish(self) -> None:
        """This rank is done; its silence means nothing from now on."""
        self._is_over.set()
        self._thread.join()
        with suppress(RuntimeError):  # rank 0, who has the store, may be gone already
            self._store.set(f"beat/{self.rank}", DONE)

    def all_finished(self) -> bool:
        """Whether every other rank is done or gone."""
        try:
            values = self._store.multi_get([f"beat/{other}" for other in self._others])
        except RuntimeError:
            return True
        ended = {rank for descriptor, rank in self._processes.items() if _has_ended(descriptor)}
        return all(value == DONE.encode() or other in ended for other, value in zip(self._others, values, strict=True))

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001 - a watch that ends in silence would let the others hang
            self._judge_alone(error)

    def _judge_alone(self, error: Exception) -> None:
        """Without a store there is nobody to ask. It is in the launcher or in rank 0, which has ended or soon will."""
        pause = time.monotonic() - self._last_beat
        if pause > self.limit_seconds:
            self._fail("lost", self.rank, f"a process that did not run for {pause:.1f} s")
            return
        until = time.monotonic() + BEAT_SECONDS
        ended: list[int] = []
        while not ended and time.monotonic() < until:
            ended = [rank for descriptor, rank in self._processes.items() if _has_ended(descriptor)]
            time.sleep(BEAT_SECONDS / 10)
        if ended:
            self._fail("lost", min(ended), "an ended process")
        else:
            self._fail("lost", None, f"no store any more ({_first_line(error)})")

    def _listen(self) -> None:
        seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        beats = 0
        poll = select.poll()
        for descriptor in self._processes:
            poll.register(descriptor, select.POLLIN)
        while not self._is_over.is_set():
            beats += 1
            self._store.set(f"beat/{self.rank}", str(beats))
            values = self._store.multi_get([*(f"beat/{other}" for other in self._others), "verdict"])
            now = time.monotonic()
            pause, self._last_beat = now - self._last_beat, now
            for other, value in zip(self._others, values, strict=False):
                if value != seen[other][0]:
                    seen[other] = (value, now)
            verdict = values[-1].decode()
            if verdict == NONE:
                self._judge(seen, now, pause)
                verdict = self._store.multi_get(["verdict"])[0].decode()
            if verdict != NONE:
                kind, rank, text = json.loads(verdict)
                self._fail(kind, rank, text)
                return
            gone = [self._processes[descriptor] for descriptor, _ in poll.poll(BEAT_SECONDS * 1e3)]
            if gone and not self._is_over.is_set():
                self._judge_ended(gone)
                for descriptor in [d for d, rank in self._processes.items() if rank in gone]:
                    poll.unregister(descriptor)

    def _judge(self, seen: dict[int, tuple[bytes, float]], now: float, pause: float) -> None:
        limit = self.limit_seconds
        if pause > limit:
            self._write_verdict("lost", self.rank, f"a process that did not run for {pause:.1f} s")
            return
        stale = [(since, other) for other, (value, since) in seen.items() if value != DONE.encode()]
        oldest, other = min(stale, default=(now, -1))
        if now - oldest > limit:
            self._write_verdict("lost", other, f"no heartbeat for {now - oldest:.1f} s")
        elif self._suspected is not None and now - self._suspected[0] > 2 * BEAT_SECONDS:
            self._write_verdict("lost", (self.rank - 1) % self.world_size, self._suspected[1])
        elif self._terminated_at is not None and now - self._terminated_at > LIMIT_SECONDS:
            self._write_verdict("terminated", self.rank, "a request to stop (SIGTERM)")

    def _judge_ended(self, gone: Sequence[int]) -> None:
        values = self._store.multi_get([f"beat/{other}" for other in gone])
        for other, value in zip(gone, values, strict=True):
            if value != DONE.encode():
                self._write_verdict("lost", other, "an ended process")

    def _write_verdict(self, kind: str, rank: int, text: str) -> None:
        self._store.compare_set("verdict", NONE, json.dumps([kind, rank, text]))

    def _fail(self, kind: str, rank: int | None, text: str) -> None:
        where = f"rank {self.rank} of {self.world_size}"
        if rank is None:
            where += ": the launcher"
        elif rank != self.rank:
            where += f": rank {rank} ({self._places[rank]})"
        failure = PeerError(
            where,
            kind=kind,
            found=text,
            expected="all ranks at work",
            remedy="Nothing of the step under way was kept, and all ranks stop: start them all again.",
        )
        with self._lock:
            self.failure = failure
            hooks = list(self._hooks)
        self._is_failed.set()
        for hook in hooks:
            hook(failure)
        if not self._is_left.wait(GRACE_SECONDS):
            self._leave(failure)


def _start_time(process: int) -> str | None:
    """When a process of this host started, in the kernel's own count; None where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _has_ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
