"""What travels between ranks: exactly what a later rank reads, and the results."""

from __future__ import annotations

import pytest
from queue_ring import placements
from small_model import small_engine

from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.runtime.distributed.routes import Routes
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.placement import crossing_state, pieces_of


@pytest.fixture(scope="module")
def whole() -> Engine:
    return small_engine()


def test_between_layers_go_streams_rotary_and_ids_only(whole: Engine) -> None:
    (placed,) = (p for p in placements(whole, 2) if len(p) == 2 and p[1].stages[0].name == "block_02")
    there, back = ([spec.key for spec in specs] for specs in Routes(placed).carried)
    assert set(there) == {
        "hidden_states",
        "pre_mix",
        "start_positions",
        "image_mask",
        "compress_rotary_cos",
        "compress_rotary_sin",
        "layers.4.engram_ids",
        "logit_positions",
    }
    assert back == ["logits"]


def test_a_rank_in_between_passes_on_what_it_does_not_read(whole: Engine) -> None:
    placed = next(p for p in placements(whole, 3) if [r.stages[0].layer_id for r in p[1:]] == [2, 4])
    carried = [{spec.key for spec in specs} for specs in Routes(placed).carried]
    assert "layers.4.engram_ids" in carried[0] & carried[1]
    assert carried[2] == {"logits"}


def test_no_cache_and_no_list_ever_travels(whole: Engine) -> None:
    for placed in placements(whole, 4):
        for specs in Routes(placed).carried:
            assert not [s.key for s in specs if s.role == "state" or s.tensor in ("topk_indices", "candidate_blocks")]


def test_a_cut_inside_a_group_is_found_by_what_would_cross_it(whole: Engine) -> None:
    stages = whole.stages
    for position in range(1, len(stages)):
        shared = crossing_state(stages[:position], stages[position:])
        free = {pieces[0].name for pieces in pieces_of(stages, whole.config)} | {"embedding", "block_00", "block_01"}
        assert bool(shared) != (stages[position].name in free), (stages[position].name, shared)
    assert crossing_state(stages[:6], stages[6:]) == ()
    assert "layers.2.compressed_kv" in crossing_state(stages[:5], stages[5:])
    assert {"candidate_blocks", "topk_indices"} & set(crossing_state(stages[:7], stages[7:]))


def test_the_results_of_every_rank_go_all_the_way(whole: Engine) -> None:
    tap = TensorSpec(name="dspark_tap", dtype="float32", shape=("batch",), role="activation", owner=3)
    placed = list(next(p for p in placements(whole, 3) if len(p) == 3))
    first = placed[1].stages[0]
    tapped = StageSpec(
        name=first.name,
        kind=first.kind,
        layer_id=first.layer_id,
        inputs=first.inputs,
        outputs=(*first.outputs, tap),
    )
    placed[1] = type(placed[1])(device="cpu:1", stages=(tapped, *placed[1].stages[1:]))
    carried = [{spec.key for spec in specs} for specs in Routes(placed).carried]
    assert ["layers.3.dspark_tap" in keys for keys in carried] == [False, True, True]
