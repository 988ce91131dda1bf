"""What every variant needs on every target: the report, the committed table, and the limits it must keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from engram_trt.plugins.kernels.ahead_of_time import CompiledKernel, expected_parameters
from engram_trt.plugins.kernels.plan import SHARED_MEMORY_LIMIT

TABLE_PATH = Path(__file__).with_name("resources.json")
"""Committed figures: target -> variant label -> registers, spills, shared memory, widest load."""

GATHER_LOAD_BYTES = 16
GATHER_FUNCTIONS = ("engram_gather_kernel", "engram_gather_shards_kernel")

Table = dict[str, dict[str, dict[str, int]]]

ACCEPTED_SPILLS: Mapping[tuple[str, int], tuple[int, str]] = {
    ("sparse_attention_kernel", 100): (
        16,
        "64 heads x 512 columns of float32 sums fill the register file; two to four words of the rest do not fit",
    ),
    ("sparse_attention_kernel", 103): (16, "as on sm_100"),
}
"""(function, sm) -> largest accepted spill in bytes and why."""


def target_name(sm: int) -> str:
    """The name a target has in the table and on the command line, e.g. sm_90."""
    return f"sm_{sm}"


def table_of(kernels: Iterable[CompiledKernel]) -> Table:
    """The resource table of some compiled kernels, sorted."""
    table: Table = {}
    for kernel in kernels:
        table.setdefault(target_name(kernel.sm), {})[kernel.variant.label] = kernel.resources()
    return {target: dict(sorted(rows.items())) for target, rows in sorted(table.items())}


def committed_table() -> Table:
    """The table as committed."""
    loaded: Table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    return loaded


def write_table(table: Table, path: Path = TABLE_PATH) -> None:
    """Write a table, one variant a line."""
    lines = []
    for target, rows in table.items():
        body = ",\n".join(f"    {json.dumps(label)}: {json.dumps(figures)}" for label, figures in rows.items())
        lines.append(f"  {json.dumps(target)}: {{\n{body}\n  }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def faults(kernel: CompiledKernel) -> tuple[str, ...]:
    """What is wrong with one compiled kernel, one line each: spills, shared memory, loads, parameters."""
    found = []
    name = f"{target_name(kernel.sm)} {kernel.variant.label}"
    accepted, _ = ACCEPTED_SPILLS.get((kernel.variant.function, kernel.sm), (0, ""))
    if kernel.spill_bytes > accepted:
        found.append(f"{name}: spills {kernel.spill_bytes} bytes a thread, accepted {accepted}")
    if kernel.shared_bytes > SHARED_MEMORY_LIMIT[kernel.sm]:
        limit = SHARED_MEMORY_LIMIT[kernel.sm]
        found.append(f"{name}: needs {kernel.shared_bytes} bytes of shared memory, the target has {limit}")
    if kernel.variant.function in GATHER_FUNCTIONS and kernel.widest_load_bytes < GATHER_LOAD_BYTES:
        found.append(f"{name}: widest load {kernel.widest_load_bytes} bytes, expected {GATHER_LOAD_BYTES}")
    if kernel.parameters != expected_parameters(kernel.variant):
        expected = expected_parameters(kernel.variant)
        found.append(f"{name}: entry takes {kernel.parameters}, the launcher packs {expected}")
    return tuple(found)
