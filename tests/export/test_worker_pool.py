"""Workers: gone with their command, held to their memory, and clear about what ended them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import worker_jobs

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import CheckpointError, PeerError, RequestError, UserError
from engram_trt.export.graph_store import GraphStore, default_folder
from engram_trt.export.memory_cap import capped_memory, clear_memory_errors
from engram_trt.export.pipeline import ExportRequest, export_checkpoint
from engram_trt.export.worker_pool import worker_pool
from engram_trt.export.write_limits import OWN_BYTES, WORKER_BYTES, WriteLimits
from engram_trt.runtime.cli import main

MIB = 1 << 20


def seen_within(seconds: float, what: Path) -> str:
    """Content of a file that another process is about to write."""
    until = time.monotonic() + seconds
    while not (what.is_file() and what.read_text()):
        assert time.monotonic() < until, f"{what.name} never came"
        time.sleep(0.05)
    return what.read_text()


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends them on Linux only")
@pytest.mark.parametrize(
    ("kill", "preload"),
    [(signal.SIGKILL, []), (signal.SIGKILL, ["worker_jobs"]), (signal.SIGINT, [])],
    ids=["kill", "kill-forkserver", "interrupt"],
)
def test_workers_end_with_their_command(tmp_path: Path, preload: list[str], kill: signal.Signals) -> None:
    """The command alone is hit, in the middle of jobs of ten minutes."""
    helpers = str(Path(worker_jobs.__file__).parent)
    command = [sys.executable, worker_jobs.__file__, str(tmp_path), *preload]
    environment = {**os.environ, "PYTHONPATH": helpers}
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        workers = [int(seen_within(300, tmp_path / f"{number}.pid")) for number in range(2)]
        assert all(map(is_running, workers))
        parent.send_signal(kill)
        parent.wait(timeout=120)
        until = time.monotonic() + 120
        while any(map(is_running, workers)):
            assert time.monotonic() < until, "a worker outlives its command"
            time.sleep(0.05)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()


@pytest.fixture(scope="module")
def capped() -> Iterator[ProcessPoolExecutor]:
    """One worker that may hold 400 MiB."""
    with worker_pool(1, memory_bytes=worker_jobs.CAP_BYTES) as pool:
        yield pool


def test_a_worker_holds_no_more_than_it_may(capped: ProcessPoolExecutor) -> None:
    assert capped.submit(worker_jobs.hold, 20 * MIB).result() == 1
    with pytest.raises(RequestError, match=r"--max-memory: found a process that needs more than its 400 MiB") as caught:
        capped.submit(worker_jobs.hold, 600 * MIB).result()
    assert "lower --jobs" in caught.value.remedy
    assert capped.submit(worker_jobs.hold, 20 * MIB).result() == 1, "it goes on with the next job"


def test_mapped_files_do_not_count(capped: ProcessPoolExecutor, tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(120 << 30)
    assert capped.submit(worker_jobs.map_read_only, str(tmp_path / "hole")).result() == 0


def test_a_user_error_arrives_as_it_was_raised(capped: ProcessPoolExecutor) -> None:
    with pytest.raises(CheckpointError) as caught:
        capped.submit(worker_jobs.complain).result()
    error = caught.value
    assert (error.where, error.found, error.expected, error.remedy) == ("shard", "a NaN", "none", "Fetch it again.")
    assert str(error) == "shard: found a NaN; expected none. Fetch it again."


def test_an_error_with_a_field_of_its_own_is_copied_whole() -> None:
    import copy

    error = copy.copy(PeerError("rank 1", kind="refused", found="a", expected="b", remedy="c"))
    assert (error.kind, error.exit_code, error.where) == ("refused", 2, "rank 1")


def test_a_killed_worker_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="killed, or the machine has no memory left"), worker_pool(1) as pool:
        pool.submit(worker_jobs.vanish).result()


def test_the_limit_ends_with_its_block() -> None:
    """Of the process itself, which is how a command that writes alone is held."""
    with (
        pytest.raises(RequestError, match="--max-memory"),
        capped_memory(worker_jobs.CAP_BYTES, num_threads=1),
    ):
        worker_jobs.hold(800 * MIB)
    assert worker_jobs.hold(800 * MIB) == 1


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^a bug$"), clear_memory_errors(1):
        raise RuntimeError("a bug")


# --- the export -------------------------------------------------------------------------------------------


def test_a_cap_below_one_process_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(tiny_checkpoint), "--out", str(tmp_path / "out"), "--layers", "3", "--max-memory", "0.5"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("engram-trt export: --max-memory: found 0.50 GiB; expected 0.625 GiB or more")
    assert not list(tmp_path.iterdir())


def test_processes_share_what_the_command_leaves() -> None:
    limits = WriteLimits(memory_bytes=OWN_BYTES + 3 * WORKER_BYTES)
    assert limits.share(3) == WORKER_BYTES
    assert limits.share(2) == WORKER_BYTES * 3 // 2
    assert WriteLimits().memory_bytes == 2 << 30


def test_an_export_over_its_limit_is_resumed(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are given less than they hold already fail at their first weight; nothing is published."""
    out, graphs = tmp_path / "out", GraphStore(default_folder())
    request = ExportRequest(
        checkpoint=tiny_checkpoint,
        out=out,
        deployment=DeploymentConfig(),
        layers=(3, 5),
        limits=WriteLimits(jobs=2),
    )
    monkeypatch.setattr(WriteLimits, "share", lambda self, workers: 16 * MIB)
    with pytest.raises(UserError, match="what is finished is kept, and the same command goes on"):
        export_checkpoint(request, graphs=graphs)
    assert not out.exists()
    export_checkpoint(replace(request, limits=WriteLimits()), graphs=graphs)
    assert (out / "manifest.json").is_file()
