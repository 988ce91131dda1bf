"""Outputs saved on one machine and compared on another; the runners they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import original, planted
from polygraphy.comparator import Comparator, CompareFunc, RunResults

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.divergence.comparison import Comparison
from engram_trt.export.accuracy.divergence.op_level import real_feeds
from engram_trt.export.accuracy.divergence.runners import ChainRunner, StageRunner, chain_feeds
from engram_trt.export.accuracy.divergence.saved import run_chain, save_outputs
from engram_trt.runtime.engine import Engine


def test_stage_runners_agree_in_polygraphys_own_comparator(
    eager: Engine, exported: Engine, comparison: Callable[..., Comparison]
) -> None:
    prompts = comparison(19, 5).prompts
    for stage in ("engram_hash", "block_04", "head"):
        feeds = [feed.inputs for feed in real_feeds(eager, prompts, frozenset([stage]))]
        runners = [StageRunner(engine, stage) for engine in (eager, exported)]
        results = Comparator.run(runners, data_loader=feeds)
        accuracy = Comparator.compare_accuracy(results, compare_func=CompareFunc.simple(atol=1e-4, rtol=1e-4))
        assert bool(accuracy), stage


def test_a_chain_runner_starts_afresh(exported: Engine, comparison: Callable[..., Comparison]) -> None:
    prompts = comparison(9, 3).prompts
    feeds = list(chain_feeds(prompts, exported))
    runner = ChainRunner(exported)
    runs = []
    for _ in range(2):
        with runner:
            runs.append([runner.infer(feed) for feed in feeds])
    for first, second in zip(*runs, strict=True):
        assert set(first) == set(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    assert runs[0][0]["positions"].tolist() == [*range(3), *range(9)]
    assert runs[0][0]["block_00.window_kv_out"].shape == (12, 64)


def saved_by(engine: Engine, made: Comparison, path: Path) -> Path:
    only_logits = made.request.level == "tokens"
    save_outputs(path, "elsewhere", run_chain(engine, made.prompts, only_logits), made.provenance)
    return path


@pytest.mark.parametrize("level", ["chain", "tokens"])
def test_saved_outputs_agree(
    level: str, exported: Engine, comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    made = comparison(9, 3, level=level)
    path = saved_by(exported, made, tmp_path / "outputs.json")
    loading = comparison(9, 3, level=level, saved=path)
    (outcome,) = loading.run().outcomes
    assert outcome.findings == []
    assert outcome.backend == "elsewhere (outputs.json)"
    assert (outcome.steps, outcome.tokens) == (3, 16)
    assert ("block_03.window_kv_out" in outcome.tracks) == (level == "chain")


def test_saved_outputs_of_a_faulty_side_are_found(
    eager: Engine, comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    made = comparison(9, 3)
    name = "engram_trt.export.modeling.engram.Engram.gate"
    gate = original(name)
    with planted(name, lambda self, streams, keys: gate(self, streams, keys) * 1.01):
        path = saved_by(eager, made, tmp_path / "outputs.json")
    (outcome,) = comparison(9, 3, backends=("onnxruntime",), reference=str(path)).run().outcomes
    assert (outcome.findings[0].stage, outcome.reference) == ("block_01", "elsewhere (outputs.json)")


def test_shapes_that_differ_are_a_difference(
    exported: Engine, comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    made = comparison(4, level="tokens")
    path = saved_by(exported, made, tmp_path / "outputs.json")
    results = RunResults.load(str(path))
    results["elsewhere"][0]["head.logits"] = results["elsewhere"][0]["head.logits"][:, :-1]
    results.save(str(path))
    report = comparison(4, level="tokens", saved=path).run()
    assert report.exit_code == 1
    assert report.outcomes[0].findings[0].kind == "shape"


@pytest.mark.parametrize("key", ["artifact_sha256", "prompts_sha256", "level"])
def test_what_belongs_to_something_else_is_refused(
    key: str, exported: Engine, comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    made = comparison(4, level="tokens")
    path = saved_by(exported, made, tmp_path / "outputs.json")
    results = RunResults.load(str(path))
    stored = json.loads(bytes(results["elsewhere"][0]["provenance"])) | {key: "another"}
    results["elsewhere"][0]["provenance"] = np.frombuffer(json.dumps(stored).encode(), dtype=np.uint8)
    results.save(str(path))
    with pytest.raises(RequestError, match="another"):
        comparison(4, level="tokens", saved=path).run()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"lst": []}', "not json"])
def test_what_is_no_saved_file_is_refused(content: str, comparison: Callable[..., Comparison], tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(content)
    with pytest.raises(RequestError, match="saved outputs"):
        comparison(4, saved=path).run()


def test_saved_outputs_cannot_be_bisected(comparison: Callable[..., Comparison], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="bisection"):
        comparison(4, saved=tmp_path / "outputs.json", bisect=True).run()
