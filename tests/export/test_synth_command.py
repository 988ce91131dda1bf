"""`engram-trt synth` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.export.synth_command import layer_list
from engram_trt.runtime.cli import main

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SMALL = str(CONFIGS / "zero4.json")


def test_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["synth", "--config", SMALL, "--out", str(out), "--seed", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    facts = json.loads(captured.out)
    opened = Checkpoint.open(out)
    assert facts["checkpoint"] == str(out)
    assert facts["tensors"] == len(opened.names())
    assert facts["bytes"] == sum(opened.entry(name).nbytes for name in opened.names())
    assert facts["config_digest"] == opened.config.digest()


def test_a_partial_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["synth", "--config", SMALL, "--layers", "3,1", "--out", str(out)]) == 0
    assert "tensors in 5 shards" in capsys.readouterr().out
    assert Checkpoint.open(out).partial_layers == (1, 3)


def test_a_config_stands_in_for_the_presets(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["synth", "--preset", "released", "--config", SMALL, "--out", str(out)]) == 0
    assert Checkpoint.open(out).config.n_layers == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "preset: found huge"),
        (["--config", "absent.json"], "absent.json"),
        (["--preset", "tiny", "--layers", "2,x"], "--layers: found '2,x'"),
        (["--preset", "tiny", "--layers", "12"], "layer_id: found 12"),
        (["--preset", "tiny", "--seed", "-1"], "--seed: found -1"),
        (["--preset", "tiny", "--tokenizer", "absent.json"], "absent.json"),
    ],
)
def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["synth", *arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["synth", "--config", SMALL, "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_layer_lists() -> None:
    assert layer_list(None) is None
    assert layer_list("8,2,2") == (2, 8)
    assert layer_list(" 3 ") == (3,)
