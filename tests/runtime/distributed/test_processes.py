"""Ranks as real processes over Gloo: the tokens of one process, and no fault that hangs, orphans or goes unnamed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import PATIENCE, PROGRAM, Ended, Ranks

from engram_trt.configs.artifact import MANIFEST_NAME, document_digest
from engram_trt.runtime.distributed.watch import BEAT_SECONDS, GRACE_SECONDS, LIMIT_SECONDS

PROMPT = ("--prompt", "Once upon a time there was a river")


def generate(artifact: Path, *options: object) -> tuple[object, ...]:
    return ("generate", artifact, *PROMPT, "--ignore-eos", *options)


def endless(artifact: Path) -> tuple[object, ...]:
    """Text that takes longer than any test."""
    return generate(artifact, "--max-tokens", 1500)


@pytest.fixture(scope="module")
def expected(tiny_artifact: Path) -> str:
    """What one process prints."""
    call = [PROGRAM, *map(str, generate(tiny_artifact, "--max-tokens", 12, "--json"))]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def require_named(ended: list[Ended], lost: int, code: int = 3) -> None:
    """Every other rank has stopped with an error that names the lost one."""
    for rank, end in enumerate(ended):
        if rank != lost:
            assert end.code == code, (rank, end)
            assert f"rank {rank} of {len(ended)}: rank {lost} (process" in end.err, (rank, end)
            assert "start them all again" in end.err
            assert "Traceback" not in end.err, end.err


def test_limits_leave_every_rank_two_seconds() -> None:
    assert LIMIT_SECONDS + BEAT_SECONDS + GRACE_SECONDS < 2


@pytest.mark.large
def test_three_ranks_print_what_one_does_and_only_the_first_prints(tiny_artifact: Path, expected: str) -> None:
    with Ranks([generate(tiny_artifact, "--max-tokens", 12, "--json")] * 3) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [end.out for end in ended] == [expected, "", ""]
    assert [end.err for end in ended] == ["", "", ""]


def test_torchrun_needs_no_deployment_file(tiny_artifact: Path, expected: str) -> None:
    """Three ranks print what one does: only the first prints, and everything ends by itself."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = generate(tiny_artifact, "--max-tokens", 12, "--json")
    call = [torchrun, "--nproc-per-node", "3", PROGRAM, *map(str, command)]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_experts_shared_by_two_ranks(split_artifact: Path, expected: str) -> None:
    """Of every layer, by all-to-all; the tokens of one process and of the ordinary export."""
    with Ranks([generate(split_artifact, "--max-tokens", 12, "--json")] * 2) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [0, 0], ended
    assert [end.out for end in ended] == [expected, ""]
    assert [end.err for end in ended] == ["", ""]


@pytest.mark.large
@pytest.mark.parametrize("experts", ['["cpu:1"]', '["cpu:1", "cpu:0"]'])
def test_experts_where_a_file_puts_them(split_artifact: Path, expected: str, tmp_path: Path, experts: str) -> None:
    file = tmp_path / "experts.toml"
    file.write_text(f'devices = ["cpu:0", "cpu:1"]\nexperts = {experts}\n')
    with Ranks([(*generate(split_artifact, "--max-tokens", 12, "--json"), "--deployment", file)] * 2) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].out == expected


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_that_shares_experts_stops_the_others(split_artifact: Path, lost: int) -> None:
    with Ranks([endless(split_artifact)] * 2) as ranks:
        ranks.await_output()
        ranks.processes[lost].kill()
        require_named(ranks.end(), lost)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_stops_the_others(tiny_artifact: Path, lost: int) -> None:
    with Ranks([endless(tiny_artifact)] * 2) as ranks:
        ranks.await_output()
        ranks.processes[lost].kill()
        require_named(ranks.end(), lost)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_points(tiny_artifact: Path, seed: int) -> None:
    """Of each of three ranks, while they meet, load, prefill or decode; none hangs, and the loss is named."""
    draw = random.Random(seed)
    lost, in_decode = seed % 3, seed % 2 == 0
    with Ranks([endless(tiny_artifact)] * 3) as ranks:
        if in_decode:
            ranks.await_output()
            time.sleep(draw.uniform(0, 1.5))
        else:
            time.sleep(draw.uniform(0.2, 8.0))
        ranks.mark()
        ranks.processes[lost].kill()
        ended = ranks.end()
    others = [end for rank, end in enumerate(ended) if rank != lost]
    assert all(end.code == 3 for end in others), ended
    assert all(end.err.strip() for end in others), ended
    if in_decode:
        require_named(ended, lost)


def test_ctrl_c_on_the_first_rank_ends_all(tiny_artifact: Path) -> None:
    with Ranks([endless(tiny_artifact)] * 2) as ranks:
        ranks.await_output()
        for process in reversed(ranks.processes):  # as a terminal does: all of them
            process.send_signal(signal.SIGINT)
        ended = ranks.end()
    assert [end.code for end in ended] == [130, 130], ended
    assert [end.err for end in ended] == ["interrupted\n", ""]


@pytest.mark.large
def test_a_rank_that_was_stopped_too_long_is_lost_and_does_not_come_back(tiny_artifact: Path) -> None:
    with Ranks([endless(tiny_artifact)] * 2) as ranks:
        ranks.await_output()
        ranks.processes[1].send_signal(signal.SIGSTOP)
        ranks.processes[0].wait(PATIENCE)
        ranks.processes[1].send_signal(signal.SIGCONT)
        ended = ranks.end()
    require_named(ended, 1)
    assert "no heartbeat" in ended[0].err
    assert ended[1].code == 3


@pytest.mark.large
def test_a_short_stop_is_no_loss(tiny_artifact: Path, expected: str) -> None:
    with Ranks([generate(tiny_artifact, "--max-tokens", 12, "--json")] * 2) as ranks:
        for _ in range(8):
            time.sleep(0.4)
            ranks.processes[1].send_signal(signal.SIGSTOP)
            time.sleep(LIMIT_SECONDS / 6)
            ranks.processes[1].send_signal(signal.SIGCONT)
        ended = ranks.end()
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].out == expected


def with_manifest(artifact: Path, out: Path) -> Path:
    """The same artefact with another digest: as an export by another version."""
    shutil.copytree(artifact, out)
    path = out / MANIFEST_NAME
    document = json.loads(path.read_text())
    document["tools"]["torch"] = "1.0"
    document.pop("digest")
    path.unlink()
    path.write_text(json.dumps({**document, "digest": document_digest(document)}))
    return out


def test_a_rank_with_another_artefact_is_refused_once(tiny_artifact: Path, tmp_path: Path) -> None:
    other = with_manifest(tiny_artifact, tmp_path / "other")
    with Ranks([endless(tiny_artifact), endless(other)]) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [2, 2], ended
    assert "rank 1: artefact: found" in ended[0].err
    assert ended[0].err.count("\n") == 1
    assert (ended[0].out, ended[1].out, ended[1].err) == ("", "", "")


@pytest.mark.large
def test_a_rank_that_cannot_start_is_reported_by_the_first(tiny_artifact: Path, tmp_path: Path) -> None:
    with Ranks([endless(tiny_artifact), endless(tmp_path / "nowhere")]) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [2, 2], ended
    assert "rank 1: start: found" in ended[0].err
    assert "nowhere" in ended[0].err
    assert ended[1].err == ""


@pytest.mark.large
def test_a_wrong_deployment_is_one_error_on_the_first_rank(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "three.toml"
    file.write_text('devices = ["cpu:0", "cpu:1", "cpu:2"]\n')
    with Ranks([(*endless(tiny_artifact), "--deployment", file)] * 2) as ranks:
        ended = ranks.end()
    assert [end.code for end in ended] == [2, 2], ended
    assert "3 devices; expected 2, one for each process" in ended[0].err
    assert ended[0].err.count("\n") == 1
    assert ended[1].err == ""


def test_a_port_in_use_is_named(tiny_artifact: Path) -> None:
    """Only rank 0 is started: it must not wait for others before it says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Ranks([endless(tiny_artifact), ("--version",)], port=port) as ranks:
            ended = ranks.end()
    assert ended[0].code == 2, ended
    assert f"MASTER_PORT: found 127.0.0.1:{port}, which is in use" in ended[0].err
    assert "Traceback" not in ended[0].err
