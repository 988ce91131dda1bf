"""`engram-trt kernels`: compile every variant for every target, without a GPU, and list what each needs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from engram_trt.configs.errors import BackendError, KernelError
from engram_trt.plugins.kernels.plan import SHARED_MEMORY_LIMIT, Variant

ALL_TARGETS: tuple[int, ...] = tuple(SHARED_MEMORY_LIMIT)
"""Every target that kernels are compiled for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCommand:
    """The verb, with the attributes the command line looks for."""

    summary: str
    description: str
    examples: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def parse_targets(text: str) -> tuple[int, ...]:
    """Compute capabilities of `all` or of a list such as `sm_90,sm_120`.

    Raises:
        KernelError: for a name that is no target with kernels.
    """
    if text == "all":
        return ALL_TARGETS
    known = {f"sm_{sm}": sm for sm in ALL_TARGETS}
    chosen = []
    for name in text.split(","):
        if name.strip() not in known:
            raise KernelError(
                "--targets",
                found=repr(name),
                expected=f"all, or some of {', '.join(known)}",
                remedy="Name targets that have kernels.",
            )
        chosen.append(known[name.strip()])
    return tuple(dict.fromkeys(chosen))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--targets", default="all", help="all, or a list such as sm_90,sm_120 (default: all)")
    parser.add_argument("--op", default="", help="only this op, e.g. SparseAttention")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, arguments included")
    parser.add_argument(
        "--write-table", action="store_true", help="rewrite the committed resource table (needs --targets all)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile and report; 1 where a kernel breaks a limit, else 0."""
    targets = parse_targets(arguments.targets)
    if arguments.write_table and (targets != ALL_TARGETS or arguments.op):
        raise KernelError(
            "--write-table",
            found=f"--targets {arguments.targets} --op {arguments.op}",
            expected="all targets and all ops",
            remedy="Drop --targets and --op.",
        )
    try:
        import triton  # noqa: F401 - only to say early that it is missing
    except ImportError as error:
        raise BackendError(
            "triton",
            found="not installed",
            expected="triton 3.6 to 3.7",
            remedy="Install the extra `kernels`.",
        ) from error
    from engram_trt.plugins.kernels.ahead_of_time import compile_all
    from engram_trt.plugins.kernels.registry import all_variants
    from engram_trt.plugins.kernels.resources import faults, table_of, write_table

    chosen = {sm: all_variants(sm, arguments.op) for sm in targets}
    kernels = compile_all(chosen, _progress(sum(map(len, chosen.values()))))
    problems = [fault for kernel in kernels for fault in faults(kernel)]
    if arguments.json:
        report = [
            {
                "target": f"sm_{kernel.sm}",
                "op": kernel.variant.op,
                "variant": kernel.variant.label,
                **kernel.resources(),
                "arguments": [f"{name}: {kind}" for name, kind in kernel.variant.signature],
            }
            for kernel in kernels
        ]
        print(json.dumps({"kernels": report, "faults": problems}, indent=1))
    else:
        print(f"{'target':7} {'regs':>4} {'spill':>5} {'shared':>7} {'load':>4}  variant")
        for kernel in kernels:
            print(
                f"sm_{kernel.sm:<4} {kernel.registers:4} {kernel.spill_bytes:5} {kernel.shared_bytes:7} "
                f"{kernel.widest_load_bytes:4}  {kernel.variant.label}"
            )
    for problem in problems:
        print(problem, file=sys.stderr)
    if arguments.write_table:
        write_table(table_of(kernels))
    return 1 if problems else 0


def _progress(total: int) -> Callable[[Variant, int], None]:
    done = 0

    def report(variant: Variant, sm: int) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{total} sm_{sm} {variant.function:40}", end="", file=sys.stderr, flush=True)

    return report


COMMAND = KernelsCommand(
    summary="compile the Triton kernels ahead of time and list what they need",
    description=(
        "Compiles every variant the launcher can choose (dtypes, tile sizes, roles) for each target, without a "
        "GPU, and lists registers, spills, shared memory, widest load and arguments. Exits with 1 where a kernel "
        "spills, needs more shared memory than the target has, or gathers without 16-byte loads."
    ),
    examples="""
        engram-trt kernels
        engram-trt kernels --targets sm_90 --op SparseAttention
        engram-trt kernels --targets sm_90,sm_120 --json
    """,
    configure=configure,
    run=run,
)
