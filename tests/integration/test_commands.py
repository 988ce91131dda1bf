"""The command line as a user meets it: one line of JSON, one clear error, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cli import main
from engram_trt.runtime.session import Session


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_generate_prints_one_line_of_json(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", tiny_artifact, "--prompt", "The river", "--max-tokens", 5, "--ignore-eos", "--json")
    assert run(*command) == 0
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert set(document) == {"token_ids", "text", "finish_reason"}
    assert document["finish_reason"] == "length"
    artifact = Artifact.open(tiny_artifact)
    tokenizer = artifact.tokenizer()
    assert document["text"] == tokenizer.decode(document["token_ids"])
    with artifact.engine() as engine:
        session = Session(engine)
        logits = session.prefill(session.add(), [*tokenizer.encode("The river"), *document["token_ids"][:-1]], "all")
    assert [int(np.argmax(row)) for row in logits[-5:]] == document["token_ids"]


def test_text_ids_and_back_ends_agree(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = Artifact.open(tiny_artifact).tokenizer().encode("A bear, a wheel")
    (tmp_path / "ids").write_text(", ".join(map(str, ids[:3])) + "\n" + "  ".join(map(str, ids[3:])))
    (tmp_path / "text").write_text("A bear, a wheel")
    answers = []
    for source in (("--ids", tmp_path / "ids"), ("--prompt-file", tmp_path / "text"), ("--prompt", "A bear, a wheel")):
        for backend in ("onnxruntime", "torch"):
            assert run("generate", tiny_artifact, *source, "--max-tokens", 3, "--backend", backend, "--json") == 0
            answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert all(answer == answers[0] for answer in answers)


def test_streamed_text_is_the_text(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", tiny_artifact, "--prompt", "Once", "--max-tokens", 12, "--temperature", 1, "--seed", 5)
    assert run(*command, "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert run(*command) == 0
    assert capsys.readouterr().out == text + "\n"


def test_seeds(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*options: object) -> list[int]:
        command = ("generate", tiny_artifact, "--prompt", "Once", "--max-tokens", 8, "--temperature", 1.0, "--json")
        assert run(*command, *options) == 0
        return list(json.loads(capsys.readouterr().out)["token_ids"])

    assert tokens("--seed", 5, "--top-p", 0.9) == tokens("--seed", 5, "--top-p", 0.9)
    assert tokens("--seed", 5) != tokens("--seed", 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ids", "unknown"), "id 1024; expected 0..1023"),
        (("--ids", "negative"), "id -4"),
        (("--ids", "words"), "entry 1: found 'two'"),
        (("--ids", "empty"), "found 0 tokens"),
        (("--prompt", "", "--no-bos"), "found 0 tokens"),
        (("--prompt-file", "absent"), "No such file"),
        (("--prompt-file", "latin"), "UTF-8"),
        (("--prompt", "a", "--max-tokens", "99999"), "max_context = 2048"),
        (("--prompt", "a", "--max-tokens", "0"), "max_context"),
        (("--prompt", "a", "--temperature", "-1"), "temperature: found -1.0"),
        (("--prompt", "a", "--backend", "abacus"), "expected"),
        (("--prompt", "a", "--checkpoint", "absent"), "no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_calls(
    tiny_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    """One error on standard error, nothing on standard output, exit code 2."""
    monkeypatch.chdir(tmp_path)
    for name, content in {"unknown": "3 1024", "negative": "3,-4", "words": "1 two", "empty": " \n"}.items():
        Path(name).write_text(content)
    Path("latin").write_bytes("é".encode("latin-1"))
    assert run("generate", tiny_artifact, *options, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("engram-trt generate: ")
    assert "Traceback" not in captured.err


def test_the_checkpoint_may_move_but_not_change(
    tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, changed = tmp_path / "moved", tmp_path / "changed"
    shutil.copytree(tiny_checkpoint, moved)
    shutil.copytree(tiny_checkpoint, changed)
    config = json.loads((changed / "config.json").read_text())
    config["transformers_version"] = "9.9.9"
    (changed / "config.json").write_text(json.dumps(config))
    command = ("generate", tiny_artifact, "--prompt", "a", "--max-tokens", 1)
    assert run(*command, "--checkpoint", moved) == 0
    assert run(*command, "--checkpoint", changed) == 2
    assert "another checkpoint" in capsys.readouterr().err


def damaged_copy(artifact: Path, target: Path, stage_file: str) -> Path:
    shutil.copytree(artifact, target)
    path = target / "stages" / stage_file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return target


@pytest.mark.parametrize("stage_file", ["block_03.onnx", "block_03.data"])
def test_a_flipped_bit_is_found(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage_file: str
) -> None:
    copy = damaged_copy(tiny_artifact, tmp_path / "copy", stage_file)
    assert run("generate", copy, "--prompt", "a", "--max-tokens", 1) == 2
    assert stage_file in capsys.readouterr().err


def test_missing_parts(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--prompt", "a", "--max-tokens", 1)
    assert run("generate", tmp_path, *command) == 2
    assert "without manifest.json" in capsys.readouterr().err
    assert run("generate", tmp_path / "absent", *command) == 2
    assert "no such folder" in capsys.readouterr().err
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    (copy / "stages" / "head.data").unlink()
    assert run("generate", copy, *command) == 2
    assert "head.data" in capsys.readouterr().err


def test_bench_prints_json_lines(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("bench", tiny_artifact, "--prompt-tokens", 20, "--decode-steps", 3, "--json")
    assert run(*command) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results[0]["benchmark"] == "machine"
    assert {"processor", "cores", "versions", "commit"} <= set(results[0])
    phases = {(result["benchmark"], result.get("backend")) for result in results[1:]}
    assert phases >= {(phase, name) for phase in ("prefill", "decode") for name in ("onnxruntime", "torch")}
    decode = next(r for r in results if r["benchmark"] == "decode" and r["backend"] == "onnxruntime")
    assert 0 <= decode["outside_stage_runs"] < 1
    assert decode["speedup_over"]["torch"] > 0
    assert sum(result["benchmark"] == "engram_gather" for result in results) == 2
