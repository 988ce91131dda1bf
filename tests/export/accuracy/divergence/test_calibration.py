"""Limits from the model's own noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.divergence import calibration
from engram_trt.export.accuracy.divergence.calibration import STRIDE, noise_between
from engram_trt.export.accuracy.divergence.tolerances import read_limits
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cli import main

TOKENS = np.array([0, 1, STRIDE, STRIDE + 1])
"""Positions 0 and 1 of rows 0 and 1."""


def observed(
    values: list[float], lists: list[int], tokens: np.ndarray = TOKENS
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        "block_00.hidden_states_out": (tokens, np.array(values, dtype=np.float32)[:, None]),
        "block_00.topk_indices": (tokens, np.array(lists, dtype=np.int32)[:, None]),
    }


def test_noise_is_the_largest_error_over_the_root_mean_square() -> None:
    noise, dropped = noise_between(observed([3, 4, 3, 4], [0] * 4), observed([3, 4.5, 3, 4], [0] * 4))
    assert noise == {"block_00.hidden_states_out": pytest.approx(0.5 / 12.5**0.5)}
    assert dropped == 0


def test_a_row_whose_choice_flipped_does_not_count() -> None:
    noise, dropped = noise_between(observed([3, 4, 3, 4], [0, 0, 0, 1]), observed([3, 4, 9, 9], [0, 0, 0, 2]))
    assert noise == {"block_00.hidden_states_out": 0.0}
    assert dropped == 1
    with pytest.raises(RequestError, match="flip in every row"):
        noise_between(observed([3, 4, 3, 4], [0, 0, 0, 1]), observed([3, 4, 9, 9], [0, 5, 0, 2]))


def test_only_tokens_that_both_saw_are_compared() -> None:
    noise, _ = noise_between(observed([3, 4, 3, 4], [0] * 4), observed([4, 4], [0, 0], TOKENS[1:3]))
    assert noise == {"block_00.hidden_states_out": pytest.approx(1 / 12.5**0.5)}


def test_a_calibration_is_written_with_how_and_read_again(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = calibration.variants("float32", 128)
    monkeypatch.setattr(calibration, "variants", lambda dtype, whole: (kinds[0], *kinds[2:4]))
    monkeypatch.setattr(calibration, "NUM_PROMPTS", 4)
    monkeypatch.setattr(calibration, "NUM_DECODE", 2)
    path = tmp_path / "tolerances.json"
    assert main(["compare", str(artifact.root), "--calibrate", "--tolerances", str(path)]) == 0
    assert "limits of" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert {"pairs", "factor", "prompts", "torch"} <= set(document["how"])
    entry = document["tensors"]["block_03.hidden_states_out"]
    assert 0 < entry["noise"] < 1e-4
    assert entry["limit"] == max(document["how"]["factor"] * entry["noise"], document["how"]["smallest"])
    assert "against whole steps" in entry["by"]
    floats = {
        f"{stage.name}.{spec.name}" for stage in artifact.stages for spec in stage.outputs if spec.dtype == "float32"
    }
    assert set(document["tensors"]) <= floats
    limits = read_limits(artifact, path)
    assert limits.measured["block_03.hidden_states_out"] == entry["limit"]
    assert read_limits(artifact, None).measured == {}


def test_a_bfloat16_artefact_is_held_against_float32() -> None:
    assert [kind.dtype for kind in calibration.variants("bfloat16", 8)][-1] == "float32"
    assert {kind.dtype for kind in calibration.variants("float32", 8)} == {""}
