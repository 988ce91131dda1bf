"""Plans: the specification's numbers, what the runtime allocates, what the files weigh, and verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram_trt.configs.deployment import DeploymentConfig, StagePlacement
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.preset_files import deployment_preset, model_preset
from engram_trt.export.planning.facts import ModelFacts, model_facts
from engram_trt.export.planning.floors import StepShape, distinct_experts, stage_work
from engram_trt.export.planning.plan import Plan, PlanRequest
from engram_trt.export.planning.report import report_lines
from engram_trt.export.planning.session_bytes import cache_rates, session_bytes
from engram_trt.export.planning.verdict import verdict
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.cli import main
from engram_trt.runtime.engram.staging import EngramStaging
from engram_trt.runtime.session import Session

GIB = 1 << 30


@pytest.fixture(scope="module")
def released() -> ModelFacts:
    return model_facts("released")


def request_of(facts: ModelFacts, **changes: Any) -> PlanRequest:
    values = {"facts": facts, "deployment": deployment_preset("released"), "num_gpus": 8, **changes}
    return PlanRequest(**values)


# --- the specification's numbers --------------------------------------------------------------------------


def test_the_released_model_in_plain_integers(released: ModelFacts) -> None:
    document = json.loads(json.dumps(Plan.of(request_of(released)).to_json()))
    assert document["checkpoint_bytes"] == 510286023000
    assert document["checkpoint_tensors"] == 96085
    assert document["checkpoint_shards"] == 48
    assert document["parameters"] == 763205315794
    assert document["cache"]["packed_bytes_per_token"] == 890
    assert document["cache"]["packed_window_slot_bytes"] == 528
    stages = {stage["name"]: stage for stage in document["stages"]}
    assert stages["block_01"]["engram_table_bytes"] == 101377628352
    assert stages["block_14"]["engram_table_bytes"] == 101380404048
    assert stages["block_05"]["expert_bytes"] == 7219445760
    assert stages["block_05"]["stored_bytes"] == 7389500888
    assert sum(stage["parameters"] for stage in document["stages"]) == 748494684784


def test_shards_are_those_of_the_released_split(released: ModelFacts) -> None:
    sizes = list(released.shards.values())
    assert len(sizes) == 48
    assert sorted(sizes)[-2:] == [101377628352 + 157440000 + 2 * 40960, 101380404048 + 157440000 + 2 * 40960]
    assert sizes[0] == 970506240


def test_caches_in_the_runtime_s_dtype() -> None:
    rates = cache_rates(model_preset("released"), "bfloat16")
    # 2.5 entries of 512 + 128 values of two bytes, and a ring slot of 512.
    assert (rates.allocated, rates.allocated_window_slot) == (3200, 1024)


# --- what the runtime does --------------------------------------------------------------------------------


def test_bytes_of_a_session_are_what_the_runtime_allocates(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    with artifact.engine(engram=EngramPlacement(residency="mmap")) as engine:
        session = Session(engine)
        held = {key: buffer.num_elements for key, buffer in session.buffers.state_buffers().items()}
        limits = symbol_limits(engine.config, engine.deployment.limits)
        planned = session_bytes(engine.stages, limits)
        assert planned.caches == sum(elements * 4 for elements in held.values())
        assert planned.caches + planned.activations == session.buffers.num_bytes(limits)
        assert isinstance(session.engram, EngramStaging)
        staged = session.engram._staged
        deployment = replace(engine.deployment, engram=EngramPlacement(residency="mmap"))
        facts = model_facts("tiny")
        plan = Plan.of(PlanRequest(facts=facts, deployment=deployment, num_gpus=0))
        parts = plan.devices[0].phases["prefill"]
        buffers = [b for item in staged.values() for b in (item.ids_buffer, item.rows_buffer, item.scales_buffer)]
        widths = {"int64": 8, "int8": 1}
        assert parts["engram_staging"] == sum(buffer.num_elements * widths[buffer.dtype] for buffer in buffers)


FULL_CONTEXT = """
import re, sys
from dataclasses import replace
from pathlib import Path
from engram_trt.configs.limits import Limits
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.session import Session
artifact = Artifact.open(Path(sys.argv[1]))
limits = Limits(max_batch=1, max_step_tokens=128, max_context=1024, max_rollback=8)
with artifact.engine(deployment=replace(artifact.manifest.deployment, limits=limits)) as engine:
    session = Session(engine)
    session.prefill(session.add(), [3 + n % 900 for n in range(1024)])
# Of this program alone: what the system says of a process counts its parent's memory before the program started.
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)))
"""


def test_peak_memory_is_as_planned(tiny_artifact: Path) -> None:
    """A whole context through every stage, in a process of its own."""
    command = [sys.executable, "-c", FULL_CONTEXT, str(tiny_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    limits = Limits(max_batch=1, max_step_tokens=128, max_context=1024, max_rollback=8)
    deployment = replace(Artifact.open(tiny_artifact).manifest.deployment, limits=limits)
    plan = Plan.of(PlanRequest(facts=model_facts("tiny"), deployment=deployment, num_gpus=0))
    assert int(done.stdout) == pytest.approx(plan.host()["total"], rel=0.1)


EXPORT = """
import re, sys
from pathlib import Path
from engram_trt.export.pipeline import ExportRequest, export_checkpoint
from engram_trt.runtime.artifact import Artifact
deployment = Artifact.open(Path(sys.argv[1])).manifest.deployment
export_checkpoint(ExportRequest(checkpoint=Path(sys.argv[2]), out=Path(sys.argv[3]), deployment=deployment))
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)))
"""


def test_peak_memory_of_an_export_is_as_planned(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its graphs are there, made by the export of the fixture."""
    command = [sys.executable, "-c", EXPORT, str(tiny_artifact), str(tiny_checkpoint), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plan = Plan.of(PlanRequest(facts=model_facts(str(tiny_checkpoint)), deployment=DeploymentConfig(), num_gpus=0))
    assert int(done.stdout) == pytest.approx(plan.export()["memory_bytes"], rel=0.1)


def test_every_stage_says_how_it_was_loaded(tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(tiny_artifact), "--backends", "onnxruntime", "--prompt-tokens", "2", "--decode-steps", "1"]
    assert main([*command, "--verify", "full", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (load,) = [result for result in results if result["benchmark"] == "load"]
    artifact = Artifact.open(tiny_artifact)
    plan = Plan.of(PlanRequest(facts=model_facts("tiny"), deployment=artifact.manifest.deployment, num_gpus=0))
    assert load["stage_bytes"] == {stage.spec.name: stage.data_bytes + stage.expert_bytes for stage in plan.stages}
    assert set(load["stage_ms"]) == {spec.name for spec in artifact.stages}


def test_files_of_an_export_are_as_planned(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    plan = Plan.of(PlanRequest(facts=model_facts("tiny"), deployment=artifact.manifest.deployment, num_gpus=0))
    planned = {stage.spec.name: stage for stage in plan.stages}
    for record in artifact.manifest.stages:
        stage = planned[record.spec.name]
        assert stage.spec == record.spec
        assert stage.data_bytes == record.data.num_bytes == (tiny_artifact / record.data.path).stat().st_size
    residents = {record.key: record.num_bytes for record in artifact.manifest.residents}
    experts = {key: size for key, size in residents.items() if "experts_" in key}
    assert sum(stage.expert_bytes for stage in plan.stages) == sum(experts.values())
    assert sum(stage.table_bytes for stage in plan.stages) == sum(residents.values()) - sum(experts.values())
    assert plan.num_engines == len({record.spec.kind for record in artifact.manifest.stages})


def test_a_checkpoint_is_planned_from_its_headers(tiny_checkpoint: Path) -> None:
    facts = model_facts(str(tiny_checkpoint))
    files = {path.name: path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors")}
    assert set(facts.shards) == set(files)
    assert all(size < files[name] for name, size in facts.shards.items())
    assert facts.num_bytes == model_facts("tiny").num_bytes == sum(facts.shards.values())


# --- floors -----------------------------------------------------------------------------------------------


def test_experts_of_a_step(released: ModelFacts) -> None:
    assert distinct_experts(released.config, 1) == pytest.approx(6)
    assert 383 < distinct_experts(released.config, 2048) <= 384


def test_a_token_s_floor_reads_what_the_specification_says_is_active(released: ModelFacts) -> None:
    """6 of 384 experts in 40 layers are 4.5 GB; 48 rows of 264 bytes are 12,672; 15.47 B parameters are active."""
    plan = Plan.of(request_of(released))
    step = StepShape(batch=1, tokens=1, context=1)
    blocks = [stage for stage in plan.stages if stage.spec.layer_id is not None]
    experts = sum(stage.expert_bytes for stage in blocks) * 6 // 384
    assert experts == 40 * 6 * 18_800_640
    work = [stage_work(stage, released.config, "bfloat16", step) for stage in blocks]
    dense = sum(stage.dense_bytes for stage in blocks)
    caches = sum(part.read_bytes for part in work) - dense - experts - 12_672
    # One window row per layer, one entry in the twenty layers of ratio 1, one index key in their five sources.
    assert caches == 2 * (40 * 512 + 20 * 512 + 5 * 128)
    active = sum(part.operations for part in work) // 2
    assert active == pytest.approx(15.47e9, rel=0.005)


def test_pipelined_devices_do_not_shorten_a_token(released: ModelFacts) -> None:
    limits = Limits(max_batch=1, max_step_tokens=128, max_context=4096)
    plans = [
        Plan.of(request_of(released, num_gpus=n, deployment=replace(deployment_preset("released"), limits=limits)))
        for n in (1, 6)
    ]
    alone, spread = (plan.to_json() for plan in plans)
    assert spread["placements"]["pipeline"]["token_us"] >= alone["placements"]["pipeline"]["token_us"] - 6
    assert spread["placements"]["experts_spread"]["token_us"] < spread["placements"]["pipeline"]["token_us"]
    assert alone["traffic"] == {"decode": [], "prefill": []}
    crossing = {(link["from"], link["to"]): link["bytes"] for link in spread["traffic"]["decode"]}
    # Streams and the reading mix; rotary tables and Engram ids come straight from where they were made.
    assert crossing["cuda:1", "cuda:2"] == 4 * 5120 * 2 + 4 * 4


def test_no_cut_lies_inside_a_group_that_shares_a_cache(released: ModelFacts) -> None:
    devices = Plan.of(request_of(released)).devices
    firsts = [device.stages[0].spec.name for device in devices]
    assert firsts == ["engram_hash", "block_02", "block_08", "block_14", "block_20", "head"]


def test_a_deployment_s_own_placement_is_planned(released: ModelFacts) -> None:
    deployment = replace(
        deployment_preset("released"),
        devices=("cuda:0", "cuda:1"),
        stages=(StagePlacement(device="cuda:0", layers=(0, 7)), StagePlacement(device="cuda:1", layers=(8, 39))),
    )
    devices = Plan.of(request_of(released, deployment=deployment, num_gpus=2)).devices
    assert [(d.name, d.stages[0].spec.name, d.stages[-1].spec.name) for d in devices] == [
        ("cuda:0", "engram_hash", "block_07"),
        ("cuda:1", "block_08", "head"),
    ]


# --- verdicts ---------------------------------------------------------------------------------------------


def test_what_fits_is_said_to_fit(released: ModelFacts) -> None:
    found = verdict(Plan.of(request_of(released, gpu_memory=160 * GIB)))
    assert (found["fits"], found["options"]) == (True, [])
    assert verdict(Plan.of(request_of(released)))["fits"] is None


def test_the_smallest_change_is_one_after_which_it_fits(released: ModelFacts) -> None:
    request = request_of(released, gpu_memory=144 * GIB)
    found = verdict(Plan.of(request))
    assert found["fits"] is False
    assert found["shortfalls"][0]["what"] == "memory of cuda:4"
    change = found["smallest_change"]
    assert change["setting"] == "step tokens"
    then = int(change["then"])
    assert verdict(Plan.of(request.with_limits(max_step_tokens=then)))["fits"] is True
    assert verdict(Plan.of(request.with_limits(max_step_tokens=then + 1)))["fits"] is False


def test_tables_on_a_device_are_the_first_thing_to_move(released: ModelFacts) -> None:
    deployment = replace(deployment_preset("released"), engram=EngramPlacement(residency="device"))
    found = verdict(Plan.of(request_of(released, deployment=deployment, gpu_memory=180 * GIB, num_gpus=2)))
    assert found["fits"] is False
    assert found["smallest_change"] == {"setting": "engram.residency", "now": "device", "then": "mmap"}


def test_more_devices_help_as_far_as_the_chain_can_be_cut(released: ModelFacts) -> None:
    found = verdict(Plan.of(request_of(released, num_gpus=1, gpu_memory=160 * GIB)))
    assert {"setting": "devices", "now": "1", "then": "2"} in found["options"]
    assert verdict(Plan.of(request_of(released, num_gpus=2, gpu_memory=80 * GIB)))["options"] == []


def test_experts_on_all_devices_may_help_where_nothing_else_does(released: ModelFacts) -> None:
    request = request_of(released, gpu_memory=80 * GIB)
    found = verdict(Plan.of(request))
    assert found["options"] == [{"setting": "experts", "now": "with their layers", "then": "shared by 6 devices"}]
    gpus = tuple(f"cuda:{number}" for number in range(6))
    deployment = replace(request.deployment, devices=gpus, experts=gpus)
    plan = Plan.of(replace(request, deployment=deployment))
    assert verdict(plan)["fits"] is True
    held = {device.phases["load"]["experts"] for device in plan.devices}
    assert max(held) - min(held) <= 7_219_445_760 * 40 // 384
    experts = sum(stage.expert_bytes for stage in Plan.of(request).stages)
    assert experts - 6 <= sum(device.phases["load"]["experts"] for device in plan.devices) <= experts


def test_host_memory_and_disk_are_judged_too(released: ModelFacts) -> None:
    found = verdict(Plan.of(request_of(released, gpu_memory=160 * GIB, host_memory=1, disk=10 * GIB)))
    assert [item["what"] for item in found["shortfalls"]] == [
        "host memory of the run",
        "host memory of the export",
        "disk of the export",
    ]


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_integers_and_needs_no_torch() -> None:
    program = (
        "import sys; from engram_trt.runtime.cli import main\n"
        "code = main(['plan', 'released', '--gpus', '8', '--gpu-memory', '141', '--json'])\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'tensorrt', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"checkpoint_bytes": 510286023000' in done.stdout
    document = json.loads(done.stdout)
    assert all(isinstance(size, int) for device in document["devices"] for size in device["phases"]["load"].values())
    assert document["verdict"]["fits"] is False


def test_the_text_names_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "released", "--gpus", "6", "--gpu-memory", "141", "--batch", "1", "--step-tokens", "128"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Fits."
    assert main(["plan", "tiny"]) == 0
    assert "15 stages" in capsys.readouterr().out


def test_given_ceilings_move_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    floors = []
    for rate in ("1000", "2000"):
        assert main(["plan", "released", "--gpus", "1", "--memory-bandwidth", rate, "--batch", "1", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["ceilings"]["sources"]["memory"] == "given"
        floors.append(document["floors"]["decode"]["step_us"])
    assert floors[0] == pytest.approx(2 * floors[1], rel=0.01)


def test_a_probe_measures_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--probe", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ceilings"]["sources"]["memory"] == "probed"
    assert document["ceilings"]["memory_bytes_per_s"] > 10**8
    assert document["ceilings"]["disk_reads_per_s"] > 10
    assert document["verdict"]["fits"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["released", "--gpus", "-1"], "--gpus: found -1"),
        (["released", "--gpu-memory", "0"], "--gpu-memory: found 0"),
        (["released", "--gpu-memory", "nan"], "--gpu-memory: found nan"),
        (["released", "--context", "99999999"], "max_context: found 99999999"),
        (["nowhere"], "nowhere: found no such folder"),
    ],
)
def test_wrong_calls(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_every_line_of_a_report_is_text(released: ModelFacts) -> None:
    plan = Plan.of(request_of(released, gpu_memory=40 * GIB))
    lines = list(report_lines({**plan.to_json(), "verdict": verdict(plan)}))
    assert any("No residency, limit or number of devices makes it fit" in line for line in lines)
    assert max(map(len, lines)) < 200


def test_a_partial_checkpoint_is_planned_as_one(tmp_path: Path) -> None:
    from engram_trt.export.synth import SynthRequest, synthesize

    synthesize(SynthRequest(config=model_preset("tiny"), out=tmp_path / "part", layers=(2, 3)))
    facts = model_facts(str(tmp_path / "part"))
    plan = Plan.of(PlanRequest(facts=facts, deployment=DeploymentConfig(), num_gpus=0))
    assert [stage.spec.layer_id for stage in plan.stages] == [2, 3]
    assert plan.to_json()["partial_layers"] == [2, 3]
