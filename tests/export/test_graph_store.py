"""Kept graphs: found under their key, never trusted when damaged, and no more than fit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper
from small_model import small_config

from engram_trt.export import graph_store
from engram_trt.export.graph_store import GraphStore
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.provenance import graph_key
from engram_trt.export.stages.chain import stage_specs


def graph(name: str) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], name, [], []))


def test_a_graph_is_found_by_another_process(tmp_path: Path) -> None:
    GraphStore(tmp_path / "new" / "folder").add("key", graph("mine"))
    found = GraphStore(tmp_path / "new" / "folder").find("key")
    assert found is not None
    assert found.graph.name == "mine"
    assert GraphStore(tmp_path).find("other") is None


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"\xff" + data[41:]]
)
def test_a_damaged_file_is_not_used(tmp_path: Path, damage: object) -> None:
    GraphStore(tmp_path).add("key", graph("mine"))
    path = tmp_path / "key.graph"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert GraphStore(tmp_path).find("key") is None


def test_the_ones_unused_longest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "MAX_GRAPHS", 2)
    store = GraphStore(tmp_path)
    for age, key in enumerate(["oldest", "older"]):
        store.add(key, graph(key))
        os.utime(tmp_path / f"{key}.graph", (age, age))
    store.add("new", graph("new"))
    assert {path.stem for path in tmp_path.iterdir()} == {"older", "new"}


def test_an_unwritable_folder_costs_nothing_but_the_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = GraphStore(tmp_path / "file")
    store.add("key", graph("mine"))
    assert store.find("key") is not None


def test_the_key_depends_on_what_decides_a_graph_only() -> None:
    config, compute = small_config(), ComputeConfig()
    specs = {s.name: s for s in stage_specs(config, compute, packed_experts=True, dspark_taps=False)}

    def key(stage: str, **changes: object) -> str:
        return graph_key(specs[stage], config, replace(compute, **changes), 1)  # type: ignore[arg-type]

    assert key("block_05") != key("block_06")
    assert graph_key(replace(specs["block_05"], name="block_99", layer_id=99), config, compute, 1) == key("block_05")
    assert key("block_05", cache_quantization=True) != key("block_05")
    assert graph_key(specs["block_05"], small_config(hc_sinkhorn_iters=19), compute, 1) != key("block_05")
    assert graph_key(specs["engram_hash"], config, compute, 3) != key("engram_hash")
