"""The chain's targets on this machine, side by side in one run; prints JSON lines.

    python tests/benchmarks/chain.py [--work DIR] [--record FILE]

Measures: export time and peak memory of `tiny` from nothing (no kept graphs); decode and prefill against the eager
modules; the share of a decode step outside the stage runs; a decode step with 4K against 64K entries allocated and
the same length used; peak memory of exporting a stage of 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engram_trt.configs.limits import Limits
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.bench import BenchConfig, bench_chain
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.machine import machine_facts
from engram_trt.runtime.session import Session

Result = dict[str, Any]
BIG_STAGE = {"vocab_size": 65536, "hidden_size": 4096}
"""A model whose head alone is 1 GiB in float32."""


def command(*arguments: object, cache: Path) -> tuple[float, int]:
    """Run `engram-trt` in a process of its own; wall seconds and peak bytes of the largest process."""
    started = perf_counter()
    program = Path(sys.executable).with_name("engram-trt")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    subprocess.run([str(program), *map(str, arguments)], check=True, env=environment, stdout=subprocess.DEVNULL)
    return perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def export_tiny(work: Path) -> Result:
    """From a synthetic checkpoint to an artefact, tracing everything."""
    command("synth", "--preset", "tiny", "--out", work / "checkpoint", cache=work)
    seconds, peak = command("export", work / "checkpoint", "--out", work / "artefact", cache=work)
    again, _ = command("export", work / "checkpoint", "--out", work / "second", cache=work)
    return {
        "benchmark": "export_tiny",
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "with_kept_graphs_seconds": round(again, 1),
        "target": "< 60 s",
    }


def decode_by_capacity(artifact: Artifact) -> Result:
    """The same steps in two sessions whose caches differ in size only, taking turns."""
    sessions = {}
    for entries in (4096, 65536):
        limits = Limits(max_batch=1, max_step_tokens=128, max_context=entries, max_rollback=8)
        deployment = replace(artifact.manifest.deployment, limits=limits)
        engine = artifact.engine("onnxruntime")
        engine = Engine.load(engine.config, deployment, engine.stages, engine.backend)
        sessions[entries] = Session(engine)
    prompt = np.random.default_rng(0).integers(3, artifact.config.vocab_size, 1024)
    for session in sessions.values():
        session.prefill(session.add(), prompt)
    seconds: dict[int, list[float]] = {entries: [] for entries in sessions}
    for step in range(200):
        for entries, session in sessions.items():
            started = perf_counter()
            session.step({0: [int(prompt[step])]})
            seconds[entries].append(perf_counter() - started)
    ratios = [large / small for small, large in zip(*seconds.values(), strict=True)]
    return {
        "benchmark": "decode_by_capacity",
        "length_used": 1024,
        "step_ms": {str(entries): round(median(values) * 1e3, 3) for entries, values in seconds.items()},
        "median_ratio": round(median(ratios), 3),
        "target": "<= 1.10",
    }


MEASURE_HEAD = """
import json, pathlib, re, sys
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.export.pipeline import ExportRequest, export_checkpoint
def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text()).group(1)) * 1024
baseline = status("VmRSS")
request = ExportRequest(
    checkpoint=pathlib.Path(sys.argv[1]), out=pathlib.Path(sys.argv[2]), deployment=DeploymentConfig(), stages=("head",)
)
manifest = export_checkpoint(request)
stage = manifest.stages[0].data
print(json.dumps({"stage_bytes": stage.num_bytes, "above_baseline_bytes": status("VmHWM") - baseline}))
"""


def export_memory(work: Path) -> Result:
    """Peak memory of exporting a head of 1 GiB, above the interpreter's with everything imported."""
    config = json.loads((work / "checkpoint" / "config.json").read_text())
    config["text_config"] |= BIG_STAGE
    (work / "big.json").write_text(json.dumps(config))
    command("synth", "--config", work / "big.json", "--out", work / "big", cache=work)
    arguments = [sys.executable, "-c", MEASURE_HEAD, str(work / "big"), str(work / "big-artefact")]
    result = subprocess.run(arguments, check=True, capture_output=True, text=True)
    facts = json.loads(result.stdout.splitlines()[-1])
    ratio = facts["above_baseline_bytes"] / facts["stage_bytes"]
    return {"benchmark": "export_memory", **facts, "ratio": round(ratio, 3), "target": "< 2"}


def measure(work: Path) -> Iterator[Result]:
    """All benchmarks, one result each."""
    yield {"benchmark": "machine", **machine_facts()}
    yield export_tiny(work)
    artifact = Artifact.open(work / "artefact")
    with artifact.engine("onnxruntime") as chain, artifact.engine("torch") as eager:
        yield from bench_chain({"onnxruntime": chain, "torch": eager}, BenchConfig(decode_steps=150, repeats=9))
    yield decode_by_capacity(artifact)
    yield export_memory(work)


def main() -> None:
    """Print the results, and record them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for checkpoints and artefacts (default: a temporary one)")
    parser.add_argument("--record", type=Path, help="also write the lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        lines = []
        for result in measure(arguments.work or Path(temporary)):
            lines.append(json.dumps(result))
            print(lines[-1], flush=True)
    if arguments.record:
        arguments.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
