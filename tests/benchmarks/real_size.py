"""The released checkpoint's size on this machine; prints JSON lines.

    python tests/benchmarks/real_size.py --tokenizer FILE [--layers 2,3] [--layers-only] [--work DIR] [--record FILE]

Measures: `plan released`; opening and checking a stand-in with all 96,085 names and real headers; the export's dry
run over it; for each layer a checkpoint of released shape, its export with copied experts beside a plain copy of
the same bytes, and a prefill and a decode step of the exported layer through ONNX Runtime beside the eager module.
Needs 21 GB of disk for a layer, which is given back before the next one; checkpoints that lie in --work are used.
Layers with an Engram table have it as a hole of 101 GB, in which only the rows that the steps read are filled. The
export digests such a table where it lies and does not copy it: that time is measured apart and told beside.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from engram_trt.runtime.machine import machine_facts

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
Result = dict[str, Any]

OPEN = """
import json, resource, sys, time
from engram_trt.configs.checkpoint import Checkpoint
started = time.perf_counter()
tensors = len(Checkpoint.open(sys.argv[1]).names())
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"tensors": tensors, "seconds": round(seconds, 2), "peak_bytes": peak}))
"""

RUN_LAYER = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
from released_layer import check_layer
print(json.dumps(check_layer(pathlib.Path(sys.argv[1]))))
"""


FILL = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from released_layer import fill_table_rows
fill_table_rows(pathlib.Path(sys.argv[1]))
"""

EXPORT = """
import json, sys, time
from engram_trt.export import pipeline
from engram_trt.runtime.cli import main
read, spent, digested = pipeline.read_resident, 0.0, 0
def timed(checkpoint, resident, progress):
    global spent, digested
    started = time.perf_counter()
    sha256 = read(checkpoint, resident, progress)
    spent, digested = spent + time.perf_counter() - started, digested + resident.num_bytes
    return sha256
pipeline.read_resident = timed
if main(sys.argv[1:]):
    sys.exit("the export failed")
print(json.dumps({"table_bytes_digested": digested, "table_seconds": round(spent, 1)}))
"""


def run(*command: object) -> tuple[str, float, int]:
    """Standard output, wall seconds and peak bytes of a process of its own."""
    started = perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed with {os.waitstatus_to_exitcode(status)}")
    return output, perf_counter() - started, usage.ru_maxrss * 1024


def engram_trt(*arguments: object) -> tuple[str, float, int]:
    """One verb of the command line."""
    return run(Path(sys.executable).with_name("engram-trt"), *arguments)


def planning() -> Result:
    """The best of three: a plan needs no more than an interpreter start and some arithmetic."""
    runs = [engram_trt("plan", "released", "--gpus", 8, "--gpu-memory", 141, "--json") for _ in range(3)]
    document = json.loads(runs[0][0])
    return {
        "benchmark": "plan_released",
        "seconds": round(min(seconds for _, seconds, _ in runs), 2),
        "peak_bytes": max(peak for _, _, peak in runs),
        "checkpoint_bytes": document["checkpoint_bytes"],
        "target": "< 2 s, no torch",
    }


def stand_in(work: Path, tokenizer: Path) -> Iterator[Result]:
    """All names and headers of the released checkpoint, weights as holes."""
    folder = work / "stand-in"
    if not folder.exists():
        command = ("synth", "--preset", "released", "--sparse", "--tokenizer", tokenizer, "--out", folder)
        _, seconds, _ = engram_trt(*command)
        yield {"benchmark": "write_stand_in", "seconds": round(seconds, 1), "disk_bytes": disk_bytes(folder)}
    output, _, _ = run(sys.executable, "-c", OPEN, folder)
    yield {"benchmark": "open_stand_in", **json.loads(output), "target": "< 20 s, < 500 MB"}
    options = ("--copy-experts", "--dtype", "bfloat16", "--dry-run", "--json")
    output, seconds, peak = engram_trt("export", folder, "--out", work / "none", *options)
    listed = json.loads(output)
    yield {
        "benchmark": "dry_run_stand_in",
        "files": len(listed["files"]),
        "bytes": listed["bytes"],
        "seconds_with_tracing": round(seconds, 1),
        "peak_bytes": peak,
    }
    shutil.rmtree(folder)


def disk_bytes(folder: Path) -> int:
    """What a folder takes on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def layer(work: Path, tokenizer: Path, layer_id: int) -> Iterator[Result]:
    """One layer of released shape: written, exported, run."""
    checkpoint, artifact = work / f"layer-{layer_id}", work / f"artefact-{layer_id}"
    if not checkpoint.exists():
        command = ("synth", "--preset", "released", "--layers", layer_id, "--tokenizer", tokenizer, "--out", checkpoint)
        _, seconds, _ = engram_trt(*command)
        yield {"benchmark": "write_layer", "layer": layer_id, "seconds": round(seconds, 1)}
    run(sys.executable, "-c", FILL, checkpoint, HELPERS)
    export = ("export", checkpoint, "--out", artifact, "--layers", layer_id, "--copy-experts")
    _, tracing, _ = engram_trt(*export, "--dry-run", "--json")
    forget(checkpoint)
    output, wall, peak = run(sys.executable, "-c", EXPORT, *export, "--json")
    facts, tables = map(json.loads, output.splitlines())
    load = round(os.getloadavg()[0], 1)
    copying = copy_seconds(artifact, work / "copy")
    yield {
        "benchmark": "export_layer",
        "layer": layer_id,
        "load": load,
        "written_bytes": facts["bytes"],
        "seconds": facts["seconds"],
        "wall_seconds": round(wall, 1),
        "tracing_seconds": round(tracing, 1),
        "copy_seconds": round(copying, 1),
        **tables,
        "ratio_to_copy": round((facts["seconds"] - tables["table_seconds"]) / copying, 2),
        "peak_bytes": peak,
        "target": "<= 2x a copy of the bytes written, < 2 GiB",
    }
    output, seconds, _ = run(sys.executable, "-c", RUN_LAYER, artifact, HELPERS)
    yield {
        "benchmark": "run_layer",
        "layer": layer_id,
        **json.loads(output.splitlines()[-1]),
        "process_seconds": round(seconds, 1),
        "target": "< 12 GiB, agrees with eager",
    }
    shutil.rmtree(artifact)
    shutil.rmtree(checkpoint)


def copy_seconds(folder: Path, scratch: Path) -> float:
    """A plain copy of the same files to the same disk, one at a time, synced like the export's."""
    forget(folder)
    seconds = 0.0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        started = perf_counter()
        with path.open("rb") as source, scratch.open("wb") as copy:
            shutil.copyfileobj(source, copy, 8 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        seconds += perf_counter() - started
        scratch.unlink()
    return seconds


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(work: Path, tokenizer: Path, layers: list[int], *, layers_only: bool) -> Iterator[Result]:
    """All benchmarks, one result each."""
    yield {"benchmark": "machine", **machine_facts(), "load": os.getloadavg()[0]}
    if not layers_only:
        yield planning()
        yield from stand_in(work, tokenizer)
    for layer_id in layers:
        yield from layer(work, tokenizer, layer_id)


def main() -> None:
    """Print the results, and record them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json with 129,280 ids")
    parser.add_argument("--layers", default="2,3", help="layers to write, export and run (default 2,3)")
    parser.add_argument("--layers-only", action="store_true", help="leave out the plan and the stand-in")
    parser.add_argument("--work", type=Path, help="folder with 21 GB of room (default: a temporary one)")
    parser.add_argument("--record", type=Path, help="also append the lines to this file")
    arguments = parser.parse_args()
    layers = [int(entry) for entry in arguments.layers.split(",") if entry]
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        for result in measure(work, arguments.tokenizer, layers, layers_only=arguments.layers_only):
            line = json.dumps(result)
            print(line, flush=True)
            if arguments.record:
                with arguments.record.open("a") as record:
                    record.write(line + "\n")


if __name__ == "__main__":
    main()
