"""The comparison's own faults: differences it must find, damage it must name, files it must not overlook."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from engram_trt.configs.errors import CheckpointError
from engram_trt.export.accuracy.golden_compare import UNKNOWN_FILE, compare_folder, plan
from engram_trt.export.accuracy.golden_folder import GoldenFolder
from engram_trt.export.accuracy.golden_report import Report
from engram_trt.export.accuracy.golden_results import NotRun, Results
from engram_trt.export.accuracy.golden_steps import chunkings
from engram_trt.runtime.cli import main

MakePart = Callable[..., Path]
Change = Callable[[Path, str, float], None]
SMALL = ("ops/index.json", "ops/rmsnorm.safetensors", "ops/hc_split_sinkhorn.safetensors")
MODEL = (
    "config.json",
    "inputs.safetensors",
    "weights.safetensors",
    "f32.prefill.safetensors",
    "f32.caches.safetensors",
)
ZERO4 = tuple(f"model/zero4/{file}" for file in MODEL)


def compare(folder: Path) -> Report:
    return compare_folder(folder, ["torch"], max_workers=1)


def wrong(report: Report) -> set[tuple[str, str]]:
    return {(check.file, check.tensor) for check in report.results.checks if not check.found.ok}


def test_an_unchanged_part_agrees(part_of_golden: MakePart) -> None:
    report = compare(part_of_golden(*SMALL))
    assert report.exit_code == 0
    assert {check.file for check in report.results.checks} == {file for file in SMALL if file.endswith("tensors")}


@pytest.mark.parametrize(
    ("file", "tensor", "amount"),
    [
        ("ops/rmsnorm.safetensors", "c1.y", 1e-3),
        ("ops/hc_split_sinkhorn.safetensors", "c2.comb", 1e-4),
        ("ops/window_idxs.safetensors", "w4.s8.p0", 1),
        ("ops/rope.safetensors", "compress.cos", 1e-5),
        ("ops/compressor.safetensors", "f32.r2.S3.step2", 1e-4),
        ("ops/quant_linear.safetensors", "c1.fp8.y_f32_q", 1e-3),
        ("ops/head.safetensors", "logits_last", 1e-3),
        ("ops/candidate_blocks.safetensors", "p3.keep", -1),
        ("ops/quant.safetensors", "f32.fp4_16.scale_e4m3", 1),
        ("ops/engram.safetensors", "f32_q.out_masked", 1e-3),
        ("ops/moe.safetensors", "c1.gate_idx", 1),
        ("ops/sparse_attn.safetensors", "f32.c2.o", 1e-3),
        ("ops/indexer.safetensors", "f32.r1src.prefill.scores", 1e-3),
        ("ops/indexer.safetensors", "f32_q.r2.k_cache_end", 1e-3),
        ("ops/hc_block.safetensors", "c0.identity_pre_mix", 1e-3),
        ("hash/layout.safetensors", "primes", 2),
        ("hash/small_layouts.safetensors", "s1.hash_masked", 1),
    ],
)
def test_a_planted_difference_is_found_and_named(
    part_of_golden: MakePart, change: Change, file: str, tensor: str, amount: float
) -> None:
    extra = ("ops/index.json",) if file.startswith("ops") else ("hash/layout.json",)
    folder = part_of_golden(file, *extra)
    change(folder / file, tensor, amount)
    report = compare(folder)
    assert report.exit_code == 1
    assert wrong(report) == {(file, tensor)}
    assert tensor in printed(report)


def test_differences_in_a_model_are_found_and_named(part_of_golden: MakePart, change: Change) -> None:
    """All kinds at once, because a run costs seconds: streams, mixes, choices, ids, latents, caches, logits."""
    planted = {
        ("f32.prefill", "logits"): 0.01,
        ("f32.prefill", "layers.2.h"): 0.01,
        ("f32.prefill", "layers.1.hc_ffn_comb"): 1e-3,
        ("f32.prefill", "layers.3.gate_idx"): 10,
        ("f32.prefill", "hash_ids"): 1,
        ("f32.prefill", "embed"): 1e-3,
        ("f32.prefill", "layers.1.latent"): 0.01,
        ("f32.caches", "after_prefill.layers.2.compress_kv_cache"): 0.01,
        ("f32.caches", "end.layers.0.window_kv_cache"): 0.01,
    }
    folder = part_of_golden(*ZERO4)
    for (part, tensor), amount in planted.items():
        change(folder / f"model/zero4/{part}.safetensors", tensor, amount)
    report = compare(folder)
    assert report.exit_code == 1
    found = wrong(report) - {("model/zero4/f32.prefill.safetensors", "layers.3.gate_w")}  # ordered by gate_idx
    assert found == {(f"model/zero4/{part}.safetensors", tensor) for part, tensor in planted}


def printed(report: Report) -> str:
    stream = io.StringIO()
    report.print_to(Console(file=stream, width=100))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 100 for line in lines)
    return "\n".join(lines)


def test_a_changed_weight_is_seen(part_of_golden: MakePart, change: Change) -> None:
    folder = part_of_golden(*ZERO4)
    change(folder / "model/zero4/weights.safetensors", "layers.0.attn.attn_sink", 1.0)
    assert any(tensor.startswith("layers.0.") for _, tensor in wrong(compare(folder)))


def test_a_truncated_file_is_named(part_of_golden: MakePart) -> None:
    folder = part_of_golden(*SMALL)
    path = folder / "ops/rmsnorm.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="rmsnorm"):
        compare(folder)


def test_checksums_name_the_damaged_file_and_comparison_goes_on(part_of_golden: MakePart, change: Change) -> None:
    folder = part_of_golden(*SMALL)
    lines = [f"{hashlib.sha256((folder / file).read_bytes()).hexdigest()}  ./{file}" for file in SMALL]
    lines.append(f"{'0' * 64}  ./model/left_out/weights.safetensors")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    assert compare(folder).exit_code == 0
    change(folder / "ops/rmsnorm.safetensors", "c0.y", 1e-3)
    report = compare(folder)
    assert wrong(report) == {("SHA256SUMS", "ops/rmsnorm.safetensors"), ("ops/rmsnorm.safetensors", "c0.y")}
    assert any(item.what == "model/left_out/weights.safetensors" for item in report.not_run())


def test_unknown_files_and_tensors_are_listed(part_of_golden: MakePart) -> None:
    folder = part_of_golden(*SMALL)
    for file in ("ops/newcomer.safetensors", "notes/else.safetensors", "model/zero4/f32.surprise.safetensors"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file({"x": torch.zeros(2)}, folder / file)
    path = folder / "ops/rmsnorm.safetensors"
    save_file(load_file(path) | {"extra": torch.zeros(1)}, path)
    report = compare_without_models(folder)
    listed = {item.file for item in report.not_run()}
    assert {"ops/newcomer.safetensors", "notes/else.safetensors", "model/zero4/f32.surprise.safetensors"} <= listed
    assert any(item.file == "ops/rmsnorm.safetensors" and item.what == "extra" for item in report.not_run())
    assert report.unaccounted == []
    assert report.exit_code == 0
    assert UNKNOWN_FILE in printed(report)


def compare_without_models(folder: Path) -> Report:
    """As `compare_folder`, leaving out jobs of models that lack their weights."""
    from engram_trt.export.accuracy import golden_compare

    golden = GoldenFolder.open(folder)
    jobs, results = plan(golden, ["torch"])
    for job in jobs:
        if job.kind != "model":
            results.extend(golden_compare.run_job(folder, job, lambda text: None))
    return Report(folder="", backends=("torch",), results=results, tensor_files=golden.tensor_files)


def test_a_file_that_nobody_mentions_fails_the_run() -> None:
    results = Results(not_run=[NotRun(file="a.safetensors", backend="torch", what="", reason="why")])
    files = ("a.safetensors", "b.safetensors")
    report = Report(folder="", backends=("torch",), results=results, tensor_files=files)
    assert report.unaccounted == ["b.safetensors"]
    assert report.exit_code == 1
    assert "neither compared nor listed: b.safetensors" in printed(report)


def test_every_file_of_a_plan_has_a_job_or_a_reason(golden: Path) -> None:
    folder = GoldenFolder.open(golden)
    jobs, results = plan(folder, ["torch", "onnxruntime"])
    ops = {job.name for job in jobs if job.kind == "op"}
    assert ops == {file.stem for file in (golden / "ops").glob("*.safetensors")}
    assert {job.name for job in jobs if job.kind == "model"} == {path.name for path in (golden / "model").iterdir()}
    assert not [item for item in results.not_run if item.reason == UNKNOWN_FILE]


def test_draft_and_stale_key_files_are_listed_with_a_reason(part_of_golden: MakePart) -> None:
    folder = part_of_golden(*ZERO4)
    for part in ("f32.decode_asis", "f32.spec", "bf16_q.prefill"):
        save_file({"logits": torch.zeros(1)}, folder / f"model/zero4/{part}.safetensors")
    _, results = plan(GoldenFolder.open(folder), ["torch", "onnxruntime"])
    reasons = {(Path(item.file).name, item.backend): item.reason for item in results.not_run}
    assert "stale index keys" in reasons["f32.decode_asis.safetensors", "onnxruntime"]
    assert ("f32.decode_asis.safetensors", "torch") not in reasons
    assert "draft" in reasons["f32.spec.safetensors", "onnxruntime"]
    assert "bfloat16" in reasons["bf16_q.prefill.safetensors", "onnxruntime"]
    assert ("bf16_q.prefill.safetensors", "torch") not in reasons


def test_other_case_names_and_sizes_are_taken_from_the_file(part_of_golden: MakePart) -> None:
    """Vectors made here by the definition, under names no golden file has."""
    folder = part_of_golden("ops/index.json")
    x, weight = torch.randn(2, 3, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    y = x / x.square().mean(-1, keepdim=True).sqrt() * weight
    case = {"other.x": x.float(), "other.weight": weight.float(), "other.y": y.float()}
    save_file(case, folder / "ops/rmsnorm.safetensors")
    report = compare(folder)
    assert [check.tensor for check in report.results.checks] == ["other.y"]
    assert report.exit_code == 0


def test_chunkings_cover_the_length_and_straddle_the_window() -> None:
    for length in (1, 2, 9, 33):
        cuts = chunkings(length, 8)
        assert all(sum(sizes) == length and min(sizes) > 0 for sizes in cuts)
        assert (length,) in cuts
    assert any(9 in sizes for sizes in chunkings(33, 8))


def test_exit_codes_and_json_of_the_command(
    part_of_golden: MakePart, change: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outcome = part_of_golden("ops/index.json", "ops/rmsnorm.safetensors"), tmp_path / "outcome.json"
    call = ["compare", "--golden", str(folder), "--backends", "torch", "--json", str(outcome)]
    assert main(call) == 0
    change(folder / "ops/rmsnorm.safetensors", "c0.y", 1e-3)
    assert main(call) == 1
    document = json.loads(outcome.read_text())
    assert [item["tensor"] for item in document["differences"]] == ["c0.y"]
    assert document["differences"][0]["error"] == pytest.approx(1e-3, rel=1e-2)
    assert document["exit_code"] == 1
    assert document["unaccounted"] == []
    assert "c0.y" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["absent", "empty", "no_config", "bad_config", "bad_index", "backend", "json"])
def test_wrong_input_is_exit_2(
    part_of_golden: MakePart, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder, backends = part_of_golden(*ZERO4, *SMALL), "torch"
    if damage == "absent":
        folder = tmp_path / "nowhere"
    elif damage == "empty":
        folder = tmp_path / "empty"
        folder.mkdir()
    elif damage == "no_config":
        (folder / "model/zero4/config.json").unlink()
    elif damage == "bad_config":
        (folder / "model/zero4/config.json").write_text("{")
    elif damage == "bad_index":
        (folder / "ops/index.json").write_text("[")
    elif damage == "backend":
        backends = "cuda"
    outcome = tmp_path / ("nowhere/outcome.json" if damage == "json" else "outcome.json")
    assert main(["compare", "--golden", str(folder), "--backends", backends, "--json", str(outcome)]) == 2
    error = capsys.readouterr().err
    assert "expected" in error
    assert "Traceback" not in error


def test_jobs_in_processes_find_the_same(part_of_golden: MakePart, change: Change) -> None:
    folder = part_of_golden(*SMALL)
    change(folder / "ops/rmsnorm.safetensors", "c0.y", 1e-3)
    here, apart = compare(folder), compare_folder(folder, ["torch"], max_workers=2)
    assert here.as_json() == apart.as_json()
    shutil.rmtree(folder / "ops")
    (folder / "hash").mkdir()
    with pytest.raises(CheckpointError, match="no tensor files"):
        compare_folder(folder, ["torch"], max_workers=2)
