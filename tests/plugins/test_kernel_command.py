"""The verb `kernels`: targets, refusals, and a report of one op."""

from __future__ import annotations

import argparse
import json

import pytest

from engram_trt.configs.errors import KernelError
from engram_trt.plugins.kernels.cli import COMMAND, parse_targets
from engram_trt.plugins.kernels.registry import all_variants


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(arguments)


def test_targets() -> None:
    assert parse_targets("all") == (89, 90, 100, 103, 120)
    assert parse_targets("sm_120,sm_90,sm_120") == (120, 90)


@pytest.mark.parametrize("text", ["", "sm_80", "90", "all,sm_90"])
def test_unknown_targets_are_refused(text: str) -> None:
    with pytest.raises(KernelError, match="--targets"):
        parse_targets(text)


def test_the_table_is_written_for_everything_or_not_at_all() -> None:
    with pytest.raises(KernelError, match="--write-table"):
        COMMAND.run(parse("--targets", "sm_90", "--write-table"))


def test_report_of_one_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.run(parse("--targets", "sm_90", "--op", "EngramHash", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == []
    (kernel,) = report["kernels"]
    assert kernel["op"] == "EngramHash"
    assert kernel["spill_bytes"] == 0
    assert kernel["arguments"][0] == "compressed_ids: *i64"
    assert kernel["arguments"][-1] == "pad_id: i64"


def test_table_lists_one_line_a_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.run(parse("--targets", "sm_90", "--op", "CacheWrite")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["target", "regs", "spill", "shared", "load", "variant"]


def test_report_of_an_op_lists_the_kernels_it_shares() -> None:
    names = {op: {variant.function for variant in all_variants(90, op)} for op in ("MoEExperts", "MoEExpertOutputs")}
    shared = {"group_by_expert_kernel", "expert_up_kernel", "expert_down_kernel"}
    assert names["MoEExperts"] == {*shared, "choose_experts_kernel", "sum_experts_kernel"}
    assert names["MoEExpertOutputs"] == {*shared, "prepare_rows_kernel"}
