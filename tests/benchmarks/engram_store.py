"""Measure the Engram store beside what it is compared with, in one run; one JSON line per measurement.

    python tests/benchmarks/engram_store.py --folder DIR [--artifact DIR --checkpoint DIR] [--record FILE]

Both sides of a ratio run in turns, round by round; the ratio is the median of the rounds' ratios, so that a busy
machine slows both; which share of the machine other processes had meanwhile is recorded. The table is 2.1 GiB of FP8
rows of normal numbers. `memcpy` is compiled C, if there is a C compiler. The cold read is compared with `fio` (a
random read of 4 KiB pages with as many reads in flight as the store has) if it is there, and the page cache is
emptied by asking for it file by file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from engram_trt.configs.safetensors_header import TensorEntry
from engram_trt.runtime.engram import store as engram_store
from engram_trt.runtime.engram.packed import PackedHeader, PackedTable, checksums_digest, pack_records
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import MappedTable, ShardFiles, TableShape

NUM_ROWS = 8_500_000  # 2.09 GiB
WIDTH, GROUPS = 256, 8
BATCH = 65_536
RELEASED_ROWS = 384_016_682
C_SOURCE = """
#include <stdint.h>
#include <string.h>
void gather(const char *table, const int64_t *ids, long n, long width, char *out) {
    for (long i = 0; i < n; i++) memcpy(out + i * width, table + ids[i] * width, width);
}
"""


def busy() -> tuple[float, float, float]:
    """Seconds so far: of all cores in use, of all cores, and of this process."""
    times, own = psutil.cpu_times(), os.times()
    total = sum(times[:8])
    return total - times.idle - times.iowait, total, own.user + own.system


def others() -> Callable[[], float]:
    """A function that says which share of the machine other processes had since."""
    before = busy()

    def share() -> float:
        used, total, own = (after - earlier for after, earlier in zip(busy(), before, strict=True))
        return round(max(used - own, 0.0) / max(total, 1e-9), 3)

    return share


Timed = Callable[[np.ndarray[Any, Any]], None]
RESULTS: list[dict[str, Any]] = []


def say(name: str, **values: Any) -> None:
    RESULTS.append({"measure": name, **values})
    print(json.dumps(RESULTS[-1]), flush=True)


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "absent: rows are dequantised by numpy"
    return {
        "machine": f"{model[0]}, {os.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB",
        "kernel": platform.release(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "numba": numba,
        "commit": commit.stdout.strip(),
        "table_gib": round(NUM_ROWS * (WIDTH + GROUPS) / 2**30, 2),
    }


def write_table(path: Path) -> tuple[TableShape, TensorEntry, TensorEntry]:
    """Rows of normal numbers in E4M3, and scales near 2^-8."""
    random = np.random.default_rng(0)
    numbers = torch.from_numpy(random.standard_normal(1 << 22, dtype=np.float32) * 100)
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    with path.open("wb") as file:
        file.write(bytes(64))
        left = NUM_ROWS * WIDTH
        while left:
            block = np.roll(codes, int(random.integers(1 << 20)))[:left]
            file.write(block.tobytes())
            left -= block.size
        file.write(random.integers(110, 125, NUM_ROWS * GROUPS, dtype=np.uint8).tobytes())
    return entries(path, NUM_ROWS)


def entries(path: Path, num_rows: int) -> tuple[TableShape, TensorEntry, TensorEntry]:
    shape = TableShape(layer_id=1, num_rows=num_rows, row_bytes=WIDTH, scale_bytes=GROUPS)
    tensors, offset = [], 64
    for name, dtype, width in (("rows", "F8_E4M3", WIDTH), ("scales", "F8_E8M0", GROUPS)):
        size = num_rows * width
        tensors.append(
            TensorEntry(name=name, shard=path, dtype=dtype, shape=(num_rows, width), offset=offset, nbytes=size)
        )
        offset += size
    return shape, tensors[0], tensors[1]


def store_of(path: Path, num_rows: int, num_threads: int) -> EngramStore:
    shape, rows, scales = entries(path, num_rows)
    files = ShardFiles({path: path.stat().st_size})
    return EngramStore({1: MappedTable(shape, rows, scales, files)}, num_threads=num_threads, on_close=files.close)


def compare(sides: dict[str, Timed], rounds: int, batch: int = BATCH) -> dict[str, list[float]]:
    """Seconds of every side, round by round, each on fresh ids."""
    random = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            ids = random.integers(0, NUM_ROWS, batch)
            started = time.perf_counter()
            run(ids)
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: dict[str, list[float]], slower: str, faster: str) -> float:
    pairs = zip(seconds[slower], seconds[faster], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def rates(seconds: dict[str, list[float]], batch: int = BATCH) -> dict[str, float]:
    return {name: round(batch / statistics.median(values)) for name, values in seconds.items()}


def warm(path: Path, packed: Path, rounds: int) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    store, single = (store_of(path, NUM_ROWS, count) for count in (2, 1))
    table = store.tables[1]
    pages = PackedTable(packed, store.shape(1))
    rows, scales = np.empty((BATCH, WIDTH), np.uint8), np.empty((BATCH, GROUPS), np.uint8)
    for start in range(0, NUM_ROWS, BATCH):  # map every page once: the page cache has them
        ids = np.arange(start, min(start + BATCH, NUM_ROWS))
        for source in (table, single.tables[1], pages):
            source.gather(ids, rows[: ids.size], scales[: ids.size])
    data = np.memmap(path, dtype=np.uint8, mode="r")
    codes = torch.from_numpy(data[64 : 64 + NUM_ROWS * WIDTH].reshape(NUM_ROWS, WIDTH)).view(torch.float8_e4m3fn)
    powers = torch.from_numpy(data[64 + NUM_ROWS * WIDTH :].reshape(NUM_ROWS, GROUPS)).view(torch.float8_e8m0fnu)
    embedding = torch.nn.functional.embedding

    def eager(ids: Any) -> torch.Tensor:
        index = torch.from_numpy(ids)
        features = embedding(index, codes).to(torch.bfloat16).unflatten(-1, (GROUPS, 32))
        return (features * embedding(index, powers).to(torch.bfloat16).unsqueeze(-1)).flatten(1)

    ids = np.random.default_rng(2).integers(0, NUM_ROWS, 4096)
    same = np.array_equal(eager(ids).view(torch.int16).numpy(), store.rows_bfloat16(1, ids).view(np.int16))
    out = np.empty((BATCH, WIDTH), np.uint16)

    def by_numpy(ids: Any) -> None:
        loop = engram_store.compiled_convert
        engram_store.compiled_convert = lambda num_rows: None
        store.rows_bfloat16(1, ids, out)
        engram_store.compiled_convert = loop

    share = others()
    seconds = compare(
        {
            "eager": lambda ids: void(eager(ids)),
            "store": lambda ids: void(store.rows_bfloat16(1, ids, out)),
            "store, one thread": lambda ids: void(single.rows_bfloat16(1, ids, out)),
            "store, without numba": by_numpy,
        },
        rounds,
    )
    say(
        "mmap warm, bf16 rows out, against eager torch",
        target=">= 5",
        ratio=ratio(seconds, "eager", "store"),
        ratio_one_thread=ratio(seconds, "eager", "store, one thread"),
        ratio_without_numba=ratio(seconds, "eager", "store, without numba"),
        rows_per_s=rates(seconds),
        equal_bits=same,
        others_share=share(),
    )
    copy = c_memcpy(data)
    if copy is None:
        return
    share = others()
    seconds = compare(
        {
            "memcpy": copy,
            "gather": lambda ids: table.gather(ids, rows, scales),
            "fetch": lambda ids: void(store.fetch(1, ids, rows, scales)),
            "fetch, one thread": lambda ids: void(single.fetch(1, ids, rows, scales)),
            "packed gather": lambda ids: pages.gather(ids, rows, scales),
        },
        rounds,
    )
    say(
        "mmap warm, bytes, against a C memcpy of 264-byte rows on one thread",
        target=">= 0.6",
        ratio_gather=ratio(seconds, "memcpy", "gather"),
        ratio_fetch_with_deduplication=ratio(seconds, "memcpy", "fetch"),
        ratio_fetch_one_thread=ratio(seconds, "memcpy", "fetch, one thread"),
        ratio_packed_gather=ratio(seconds, "memcpy", "packed gather"),
        rows_per_s=rates(seconds),
        others_share=share(),
    )


def void(_: object) -> None:
    """A result that is dropped."""


def c_memcpy(data: Any) -> Timed | None:
    compiler = shutil.which("cc")
    if compiler is None:
        say("C memcpy", skipped="no C compiler")
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "gather.c", Path(folder) / "gather.so"
        source.write_text(C_SOURCE)
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).gather
    records = data[64:]
    out = np.empty((BATCH, WIDTH + GROUPS), np.uint8)

    def run(ids: Any) -> None:
        table, where, target = (ctypes.c_void_p(array.ctypes.data) for array in (records, ids, out))
        function(table, where, ctypes.c_long(ids.size), ctypes.c_long(WIDTH + GROUPS), target)

    return run


def pack(path: Path, packed: Path) -> None:
    """The same table, packed without a checkpoint around it."""
    shape, rows, scales = entries(path, NUM_ROWS)
    header = PackedHeader(
        layer_id=1, num_rows=shape.num_rows, row_bytes=WIDTH, scale_bytes=GROUPS, source_digest="benchmark"
    )
    data = np.memmap(path, dtype=np.uint8, mode="r")
    parts = [data[entry.offset : entry.offset + entry.nbytes].reshape(entry.shape) for entry in (rows, scales)]
    checksums = np.zeros(header.num_blocks, dtype=np.uint32)  # not read here
    with packed.open("wb") as file:
        from dataclasses import replace

        final = replace(header, checksums_sha256=checksums_digest(checksums), num_blocks_done=header.num_blocks)
        file.write(final.to_page())
        file.seek(header.data_offset)
        for block in range(header.num_blocks):
            first, last = header.block_rows(block)
            file.write(pack_records(header, *(part[first:last] for part in parts)).tobytes())


def forget(path: Path) -> None:
    """Empty the page cache of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cold(path: Path, packed: Path, rounds: int, depth: int) -> None:
    """Random rows from the disk; one fetch keeps up to a queue of reads in flight, as fio does."""
    fio = shutil.which("fio")
    if fio is None:
        say("cold", skipped="no fio")
        return
    random, batch = np.random.default_rng(3), 4096
    pages_per_s: dict[str, list[float]] = {"fio": [], "mmap": [], "packed": []}
    for _ in range(rounds):
        forget(path)
        forget(packed)
        command = [fio, "--name=cold", f"--filename={path}", "--rw=randread", "--bs=4k", "--readonly", "--direct=1"]
        command += ["--ioengine=libaio", f"--iodepth={depth}", "--time_based", "--runtime=3", "--output-format=json"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        pages_per_s["fio"].append(found["jobs"][0]["read"]["iops"])
        rows, scales = np.empty((batch, WIDTH), np.uint8), np.empty((batch, GROUPS), np.uint8)
        for name in ("mmap", "packed"):
            ids = np.unique(random.integers(0, NUM_ROWS, batch))
            forget(path if name == "mmap" else packed)
            store = store_of(path, NUM_ROWS, 1)
            table = store.tables[1] if name == "mmap" else PackedTable(packed, store.shape(1))
            before = psutil.disk_io_counters()
            started = time.perf_counter()
            table.gather(ids, rows[: ids.size], scales[: ids.size])
            seconds = time.perf_counter() - started
            after = psutil.disk_io_counters()
            read = (after.read_bytes - before.read_bytes) / 4096 if before and after else 0
            pages_per_s[name].append(read / seconds)
            last = {"rows": int(ids.size), "pages_read": round(read), "ms": round(seconds * 1e3, 1)}
            say(f"cold, one fetch, {name}", **last)
            store.close()
    medians = {name: round(statistics.median(values)) for name, values in pages_per_s.items()}
    say(
        "cold, pages of 4 KiB a second against fio",
        target="<= 1.3",
        queue_depth=depth,
        pages_per_s=medians,
        slowdown_mmap=round(medians["fio"] / medians["mmap"], 3),
        slowdown_packed=round(medians["fio"] / medians["packed"], 3),
    )


def opening(folder: Path) -> None:
    path = folder / "sparse.safetensors"
    with path.open("wb") as file:
        file.truncate(64 + RELEASED_ROWS * (WIDTH + GROUPS))
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    store = store_of(path, RELEASED_ROWS, 2)
    opened = time.perf_counter() - started
    rows, scales = np.empty((3, WIDTH), np.uint8), np.empty((3, GROUPS), np.uint8)
    store.fetch(1, np.array([0, 2**24, RELEASED_ROWS - 1]), rows, scales)
    ready = time.perf_counter() - started
    memory = psutil.Process().memory_info().rss - before
    say(
        "open a table of 101 GB",
        target="< 1 s, < 200 MB",
        seconds=round(opened, 4),
        seconds_with_first_rows=round(ready, 4),
        memory_mb=round(memory / 1e6, 1),
    )
    store.close()
    path.unlink()


def decode(artifact_folder: Path, checkpoint: Path | None, steps: int, sequences: int) -> None:
    """Decode steps of one token a sequence: fetched, resident, and resident once more, in an order by chance.

    The second resident chain says how far two equal ones are apart, so what the first figure is worth.
    """
    from engram_trt.configs.engram_placement import EngramPlacement
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.session import Session

    artifact = Artifact.open(artifact_folder, checkpoint)
    sessions = {}
    for name in ("resident", "resident again", "mmap"):
        residency = name.split()[0].replace("resident", "device")
        sessions[name] = Session(artifact.engine(engram=EngramPlacement(residency=residency)))
        for _ in range(sequences):
            sessions[name].prefill(sessions[name].add(), np.arange(5, 65))
    random = np.random.default_rng(4)
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    waits, fetches = [], []
    share = others()
    for turn in range(steps + 20):
        tokens = random.integers(5, artifact.config.vocab_size // 2, sequences).tolist()
        for name in random.permutation(list(sessions)):
            started = time.perf_counter()
            sessions[name].step({row: [token] for row, token in enumerate(tokens)})
            seconds[name].append(time.perf_counter() - started)
        if turn < 20:  # warm up
            for values in seconds.values():
                values.clear()
            continue
        staging = sessions["mmap"].engram
        waits.append(staging.to_json()["total"]["wait_ms"] if staging else 0.0)
        fetches.append(np.sum(sessions["mmap"].stage_seconds.get("fetch", 0.0)) * 1e3)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    say(
        "decode with mmap and prefetch against resident",
        target="<= 1.05 for a step of at least 10 ms",
        ratio=ratio(seconds, "mmap", "resident"),
        ratio_resident_again=ratio(seconds, "resident again", "resident"),
        ratio_of_medians=round(medians["mmap"] / medians["resident"], 3),
        ratio_of_fastest=round(min(seconds["mmap"]) / min(seconds["resident"]), 3),
        steps=steps,
        sequences=sequences,
        step_ms={name: round(value, 3) for name, value in medians.items()},
        fetch_ms=round(statistics.median(fetches), 3),
        wait_ms=round(statistics.median(waits), 4),
        others_share=share(),
        model=artifact.config.digest()[:12],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="5 GiB on the disk to be measured")
    parser.add_argument("--artifact", type=Path, help="an exported artefact for the decode measurement")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300, help="decode steps of each chain")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1], help="of a decode step; one measurement each")
    parser.add_argument("--queue-depth", type=int, default=64)
    parser.add_argument("--record", type=Path, help="write the results there as one JSON document")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    say("machine", **machine())
    path, packed = arguments.folder / "table.safetensors", arguments.folder / "table.packed"
    if not packed.exists():
        write_table(path)
        pack(path, packed)
    opening(arguments.folder)
    warm(path, packed, arguments.rounds)
    if arguments.artifact:
        for sequences in arguments.sequences:
            decode(arguments.artifact, arguments.checkpoint, arguments.steps, sequences)
    cold(path, packed, min(arguments.rounds, 5), arguments.queue_depth)
    if arguments.record:
        arguments.record.write_text(json.dumps(RESULTS, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
