"""Heartbeats: who is lost, why, and that everyone hears the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from engram_trt.configs.errors import PeerError
from engram_trt.runtime.distributed import watch as module
from engram_trt.runtime.distributed.watch import Watch

PATIENCE = 20.0
"""For threads on a busy machine; nothing is compared with it."""


class Memory:
    """A store in memory; `is_gone` makes every call fail, as when its process has ended."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False
        self.lock = threading.Lock()

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._check()
        with self.lock:
            self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._check()
        with self.lock:
            return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._check()
        with self.lock:
            if self.values.get(key, "") == expected:
                self.values[key] = desired
            return self.values[key].encode()


class World:
    """Some ranks in one process, each with its watch; their end is forced into a list."""

    def __init__(self, size: int) -> None:
        self.store, self.forced = Memory(), list[PeerError]()
        self.watches = [Watch(self.store, rank, size, self.forced.append) for rank in range(size)]

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.watches[rank].limit_seconds = 1.0
            self.watches[rank].start()

    def failure(self, rank: int) -> PeerError:
        watch = self.watches[rank]
        assert watch._is_failed.wait(PATIENCE)
        assert watch.failure is not None
        return watch.failure


@pytest.fixture
def world() -> Iterator[World]:
    world = World(3)
    yield world
    for watch in world.watches:
        watch._is_over.set()


def test_a_rank_without_a_heartbeat_is_lost_for_all_others(world: World) -> None:
    world.start(0, 1)
    for rank in (0, 1):
        error = world.failure(rank)
        assert (error.kind, error.exit_code) == ("lost", 3)
        assert "rank 2 (process" in str(error)
        assert "no heartbeat for" in error.found
    with pytest.raises(PeerError, match="rank 2"):
        world.watches[0].check()


def test_living_ranks_lose_nobody(world: World) -> None:
    world.start(0, 1, 2)
    time.sleep(2.5 * module.BEAT_SECONDS)
    assert [watch.failure for watch in world.watches] == [None] * 3
    assert not world.watches[0].all_finished()
    for watch in world.watches[1:]:
        watch.finish()
    assert world.watches[0].all_finished()
    time.sleep(2.5 * module.BEAT_SECONDS)
    assert world.watches[0].failure is None


def test_the_first_word_counts(world: World) -> None:
    world.start(0, 1, 2)
    world.watches[1].tell("refused", "no such folder")
    world.watches[2].tell("failed", "something later")
    for rank in (0, 2):
        error = world.failure(rank)
        assert (error.kind, error.exit_code, error.found) == ("refused", 2, "no such folder")


def test_hooks_hear_it_also_when_they_come_late(world: World) -> None:
    heard: list[str] = []
    world.watches[0].on_failure(lambda error: heard.append(f"early {error.kind}"))
    world.start(0, 1, 2)
    world.watches[2].tell("interrupted", "by the user")
    assert world.failure(0).exit_code == 130
    world.watches[0].on_failure(lambda error: heard.append(f"late {error.kind}"))
    assert sorted(heard) == ["early interrupted", "late interrupted"]


def test_a_program_that_does_not_leave_is_ended(world: World) -> None:
    world.watches[1].leaving()
    world.start(0, 1, 2)
    world.watches[2].tell("failed", "x")
    for watch in world.watches:
        watch._thread.join(PATIENCE)
    assert sorted(str(error).split(":")[0] for error in world.forced) == ["rank 0 of 3", "rank 2 of 3"]


def test_a_store_that_is_gone_is_a_loss(world: World) -> None:
    world.start(0, 1, 2)
    world.store.is_gone = True
    error = world.failure(1)
    assert error.kind == "lost"
    assert "the launcher: found no store any more (Connection reset by peer)" in str(error)


def test_a_process_of_this_host_that_ends_is_known_by_its_end() -> None:
    """Long before its heartbeat would be missed: the limit here is far away."""
    world = World(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        host, _, _ = json.loads(world.store.values["process/1"])
        world.store.values["process/1"] = json.dumps([host, process.pid, module._start_time(process.pid)])
        world.watches[0].start()
        assert world.watches[0].limit_seconds == module.LOADING_LIMIT_SECONDS
        process.kill()
        error = world.failure(0)
    assert error.found == "an ended process"
    assert f"rank 1 (process {process.pid}" in str(error)


def test_a_process_with_a_reused_number_is_not_watched() -> None:
    world = World(2)
    host, process, _ = json.loads(world.store.values["process/1"])
    world.store.values["process/1"] = json.dumps([host, process, "1"])
    world.start(0)
    assert world.watches[0]._processes == {}
    world.watches[0]._is_over.set()


def test_a_rank_that_was_stopped_itself_says_so() -> None:
    """As after SIGSTOP and SIGCONT: the others have given it up, and it must not go on."""
    world = World(2)
    world.watches[0].limit_seconds = -1.0
    world.watches[0].start()
    error = world.failure(0)
    assert "rank 0 of 2: found a process that did not run for" in str(error)


def test_a_request_to_stop_waits_for_the_one_who_died(world: World) -> None:
    """A launcher that sees a rank die stops the others at once; they still name it."""
    world.start(0, 1)
    world.watches[0].terminate()
    assert "rank 2" in str(world.failure(0))


def test_a_request_to_stop_without_a_loss_is_obeyed() -> None:
    world = World(2)
    for watch in world.watches:
        watch.start()
    world.watches[1].terminate()
    error = world.failure(1)
    assert (error.kind, error.exit_code) == ("terminated", 143)
    assert world.failure(0).exit_code == 143


def test_a_broken_connection_is_the_neighbours_unless_someone_knows_better() -> None:
    world = World(3)
    for watch in world.watches:
        watch.start()
    with pytest.raises(PeerError, match=r"rank 1 \(process .*a broken connection \(reset\)"):
        world.watches[2].raise_broken(RuntimeError("reset\nmore"))
    assert "rank 1" in str(world.failure(0))
