"""Every variant compiles ahead of time, keeps its target's limits and takes the arguments the launcher packs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from engram_trt.plugins.kernels.ahead_of_time import (
    CompiledKernel,
    compile_variant,
    expected_parameters,
    widest_load,
)
from engram_trt.plugins.kernels.plan import SHARED_MEMORY_LIMIT, Variant
from engram_trt.plugins.kernels.registry import all_variants
from engram_trt.plugins.kernels.resources import committed_table, faults, target_name

TARGETS = tuple(SHARED_MEMORY_LIMIT)
PRIMARY = 90

# ptxas may allocate registers a little differently from one release to the next.
REGISTER_SLACK = 8


@cache
def compiled(variant: Variant, sm: int) -> CompiledKernel:
    return compile_variant(variant, sm)


def one_of_each_function(sm: int) -> Iterator[Variant]:
    """The most demanding variant of every function by shared memory in the committed table."""
    rows = committed_table()[target_name(sm)]
    hardest: dict[str, Variant] = {}
    for variant in all_variants(sm):
        best = hardest.get(variant.function)
        if best is None or rows[variant.label]["shared_bytes"] > rows[best.label]["shared_bytes"]:
            hardest[variant.function] = variant
    yield from hardest.values()


def check(variant: Variant, sm: int) -> None:
    kernel = compiled(variant, sm)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert kernel.num_threads == 32 * variant.num_warps
    assert faults(kernel) == ()
    recorded = committed_table()[target_name(sm)][variant.label]
    measured = kernel.resources()
    assert abs(measured.pop("registers") - recorded["registers"]) <= REGISTER_SLACK
    assert measured == {name: recorded[name] for name in measured}


@pytest.mark.parametrize("variant", all_variants(PRIMARY), ids=lambda variant: variant.label)
def test_every_variant_on_the_primary_target(variant: Variant) -> None:
    check(variant, PRIMARY)


@pytest.mark.parametrize("sm", [sm for sm in TARGETS if sm != PRIMARY])
def test_every_function_on_the_other_targets(sm: int) -> None:
    for variant in one_of_each_function(sm):
        check(variant, sm)


@pytest.mark.large
@pytest.mark.parametrize("sm", [sm for sm in TARGETS if sm != PRIMARY])
def test_every_variant_on_the_other_targets(sm: int) -> None:
    for variant in all_variants(sm):
        check(variant, sm)


@pytest.mark.parametrize("sm", TARGETS)
def test_the_committed_table_lists_every_variant_and_breaks_no_limit(sm: int) -> None:
    rows = committed_table()[target_name(sm)]
    assert set(rows) == {variant.label for variant in all_variants(sm)}
    for label, figures in rows.items():
        assert figures["shared_bytes"] <= SHARED_MEMORY_LIMIT[sm], label


def test_widest_load_reads_direct_and_asynchronous_loads() -> None:
    assert widest_load("ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];") == 16
    assert widest_load("ld.global.b16 %rs1, [%rd1];\n ld.global.v2.b64 {%rd1,%rd2}, [%rd3];") == 16
    assert widest_load("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;") == 16
    assert widest_load("st.global.v4.b32 [%rd1], {%r1,%r2,%r3,%r4};") == 0


def test_expected_parameters_end_in_the_scratch_pointers() -> None:
    variant = next(v for v in all_variants(PRIMARY) if v.function == "quantize_dequantize_kernel")
    assert expected_parameters(variant) == ("b64", "b64", "b64", "b64", "b64")
