"""Two processes against one, over Gloo, one core each; prints JSON lines. Wants two quiet cores.

    python tests/benchmarks/distributed.py [--work DIR] [--record FILE] [--rounds N] [--timeline FILE]

The model is `tiny` with wider layers, so that a step of one row takes at least 10 ms on one core. Four sequences are
in flight as micro-batches of one row. One process and two take turns, round by round. Beside them stands one process
that feeds the same sequences as one batch of four rows: what batching alone gives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from engram_trt.runtime.machine import machine_facts

Result = dict[str, Any]
WIDER = {"hidden_size": 512, "moe_intermediate_size": 256}
DEPLOYMENT = "[limits]\nmax_batch = 4\nmax_step_tokens = 16\nmax_context = 256\n"
SEQUENCES, PROMPT_TOKENS = 4, 8
BIN = Path(sys.executable).parent


def program(*arguments: object, cores: set[int], ranks: int = 1) -> list[Result]:
    """Run `engram-trt` on some cores, in one process or several; its JSON lines."""
    launcher = [str(BIN / "torchrun"), "--nproc-per-node", str(ranks)] if ranks > 1 else []
    call = [*launcher, str(BIN / "engram-trt"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        call,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def make_artifact(work: Path, cores: set[int]) -> Path:
    """Synthesize and export the wider model, unless `work` has it from an earlier run."""
    out = work / "artefact"
    if out.is_dir():
        return out
    config = json.loads((Path(__file__).parents[2] / "configs" / "models" / "tiny.json").read_text())
    config["text_config"] |= WIDER
    (work / "wider.json").write_text(json.dumps(config))
    (work / "deployment.toml").write_text(DEPLOYMENT)
    program("synth", "--config", work / "wider.json", "--out", work / "checkpoint", cores=cores)
    export = ("export", work / "checkpoint", "--out", out, "--deployment", work / "deployment.toml")
    program(*export, cores=cores)
    return out


def measure(work: Path, rounds: int, new_tokens: int, timeline: Path | None) -> list[Result]:
    """All rounds, and what they amount to."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    artifact = make_artifact(work, set(cores))
    two = work / "two.toml"
    two.write_text(f'devices = ["cpu:{cores[0]}", "cpu:{cores[1]}"]\n')
    shared = ("--sequences", SEQUENCES, "--prompt-tokens", PROMPT_TOKENS, "--decode-steps", new_tokens, "--json")
    runs: dict[str, list[Result]] = {"one": [], "two": [], "batch": []}
    for _ in range(rounds):
        alone = program("bench", artifact, "--backends", "onnxruntime", *shared, cores={cores[0]})
        runs["one"] += [result for result in alone if result["benchmark"] == "pipeline"]
        runs["batch"] += [result for result in alone if result["benchmark"] == "batch"]
        options = ("--deployment", two, *(() if timeline is None else ("--timeline", timeline)))
        together = program("bench", artifact, *options, *shared, cores=set(cores), ranks=2)
        runs["two"] += [result for result in together if result["benchmark"] == "pipeline"]
    rates = {name: [result["tokens_per_s"] for result in results] for name, results in runs.items()}
    one, both = median(rates["one"]), median(rates["two"])
    return [
        {"benchmark": "machine", **machine_facts(), "load": os.getloadavg()},
        *runs["one"],
        *runs["batch"],
        *runs["two"],
        {
            "benchmark": "two_processes_over_one",
            "model": f"tiny with {WIDER}",
            "sequences": SEQUENCES,
            "step_ms_of_one_row_in_one_process": round(1e3 / one, 2),
            "tokens_per_s": rates,
            "ratio": round(both / one, 2),
            "ratio_to_one_batch_of_four": round(both / median(rates["batch"]), 2),
            "same_tokens": len({result["digest_of_tokens"] for result in runs["one"] + runs["two"]}) == 1,
            "target": "ratio >= 1.5 at a step >= 10 ms",
        },
    ]


def main() -> None:
    """Print the results, and record them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the model and its export (default: a temporary one)")
    parser.add_argument("--record", type=Path, help="also write the lines to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=40, help="of each sequence (default 40)")
    parser.add_argument("--timeline", type=Path, help="Chrome trace of the two processes' last round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        results = measure(work.resolve(), arguments.rounds, arguments.new_tokens, arguments.timeline)
    lines = [json.dumps(result) for result in results]
    print("\n".join(lines))
    if arguments.record:
        arguments.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
