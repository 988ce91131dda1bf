"""`engram-trt compare ARTIFACT`: exit codes, table, JSON; wrong calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from faults import original, planted

from engram_trt.export.accuracy.divergence.report import SCHEMA_FILE
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cli import build_parser, commands, main

OPTIONS = {
    "--backends",
    "--bisect",
    "--calibrate",
    "--checkpoint",
    "--golden",
    "--html",
    "--json",
    "--keep-going",
    "--level",
    "--load-outputs",
    "--mode",
    "--num-decode",
    "--num-prompts",
    "--prompts",
    "--reference",
    "--save-outputs",
    "--stages",
    "--stale-index-keys",
    "--tolerances",
    "--verify",
}


def compare(artifact: Artifact, *options: str) -> int:
    return main(["compare", str(artifact.root), "--num-decode", "2", *options])


@pytest.fixture
def short_prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(
        "The ferry left the island at seven,\nas it had every morning.\n\nWer im Frühjahr\n", encoding="utf-8"
    )
    return path


def test_options_are_the_agreed_ones() -> None:
    parser = build_parser(commands())
    (verbs,) = [action for action in parser._actions if action.dest == "verb"]
    actions = verbs.choices["compare"]._actions  # type: ignore[index, union-attr]
    found = {name for action in actions for name in action.option_strings if name.startswith("--")}
    assert found - {"--help"} == OPTIONS


def test_agreement_is_0_and_the_table_fits(
    artifact: Artifact, short_prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert compare(artifact, "--prompts", str(short_prompts), "--json", str(report)) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "onnxruntime and torch agree" in printed
    document = json.loads(report.read_text())
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))
    experts = {key: item for key, item in document["outcomes"][0]["agreement"].items() if key.endswith(".experts")}
    assert len(experts) == artifact.config.n_layers
    assert all(item["same"] == item["compared"] > 0 for item in experts.values())
    (outcome,) = document["outcomes"]
    assert (document["exit_code"], outcome["verdict"], outcome["first_divergence"]) == (0, "agree", None)
    assert document["prompts"]["count"] == 2
    compared = {key.partition(".")[0] for key in outcome["tensors"]}
    assert compared == {spec.name for spec in artifact.stages}


def test_a_difference_is_1_and_named(
    artifact: Artifact, short_prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    name = "engram_trt.plugins.sparse_attention.reference.sparse_attention"
    attention = original(name)

    def nan_in_one_head(*arguments: Any) -> Any:
        output = attention(*arguments)
        output[:, -1, 1, 3] = float("nan")
        return output

    with planted(name, nan_in_one_head):
        code = compare(artifact, "--prompts", str(short_prompts), "--bisect", "--json", str(report))
    assert code == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "first divergence: block_00" in printed
    document = json.loads(report.read_text())
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))
    first = document["outcomes"][0]["first_divergence"]
    assert (first["stage"], first["kind"], first["error"], first["cause"]) == ("block_00", "not finite", "inf", "own")
    assert (first["op"]["name"], first["op"]["tensor"]) == ("SparseAttention", "attention_output")
    assert first["worst"][0]["reference"] == "nan"


@pytest.mark.parametrize("level", ["op", "stage", "tokens"])
def test_other_levels_agree(
    level: str, artifact: Artifact, short_prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(artifact, "--prompts", str(short_prompts), "--level", level) == 0
    printed = capsys.readouterr().out
    assert f"level {level}" in printed
    lines = {"op": "SparseAttention", "stage": "block_11", "tokens": "likeliest token the same        1\n"}
    assert lines[level] in printed


def test_some_stages_only(artifact: Artifact, short_prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(artifact, "--prompts", str(short_prompts), "--stages", "block_03,head", "--mode", "free") == 0
    printed = capsys.readouterr().out
    assert "block_03" in printed
    assert "block_04" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "block_99"], "--stages: found block_99"),
        (["--backends", "nonsense"], "--backend: found 'nonsense'"),
        (["--backends", ","], "--backends"),
        (["--num-prompts", "0"], "--num-prompts: found 0"),
        (["--num-decode", "-1"], "--num-decode: found -1"),
        (["--prompts", "no such file"], "no readable text"),
        (["--json", "no such folder/report.json"], "--json"),
        (["--tolerances", "no such file"], "no such file"),
        (["--golden", "somewhere"], "an artefact and --golden"),
    ],
)
def test_wrong_calls_are_2(
    artifact: Artifact, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(artifact, *options) == 2
    assert message in capsys.readouterr().err


def test_no_artefact_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare"]) == 2
    assert "neither an artefact nor --golden" in capsys.readouterr().err
    assert main(["compare", str(tmp_path)]) == 2


def test_a_prompt_that_does_not_fit(artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word and word " * 3000)
    assert compare(artifact, "--prompts", str(path)) == 2
    assert "max_context" in capsys.readouterr().err


def test_another_tokenizer_is_refused(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "artefact"
    shutil.copytree(tiny_artifact, copy)
    document = json.loads((copy / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Lowercase"}
    (copy / "tokenizer.json").write_text(json.dumps(document))
    assert main(["compare", str(copy), "--num-prompts", "1"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_calibration_of_another_artefact_is_refused(
    artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tolerances.json"
    path.write_text(json.dumps({"schema": 1, "artifact_sha256": "0" * 64, "tensors": {}}))
    assert compare(artifact, "--tolerances", str(path)) == 2
    assert "another artefact" in capsys.readouterr().err


def test_free_mode_stops_a_row_where_the_sides_part(comparison: Callable[..., Any], eager: Any, exported: Any) -> None:
    made = comparison(5, 7, num_decode=3, level="tokens", free=True)
    outcome = made.compare("onnxruntime", eager, exported, eager)
    assert outcome.findings == []
    assert outcome.token_scores["greedy_agreement"] == 1
