"""Stages on devices: legal cuts, balance, what a deployment says, every refusal."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from engram_trt.configs.deployment import DeploymentConfig, StagePlacement
from engram_trt.configs.errors import DeploymentError
from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.stages.chain import stage_specs
from engram_trt.runtime.placement import StageCost, floor_seconds, pieces_of, place, stage_cost


def chain(name: str) -> tuple[ModelConfig, tuple[StageSpec, ...]]:
    config = model_preset(name)
    compute = ComputeConfig.from_deployment(DeploymentConfig())
    return config, stage_specs(config, compute, packed_experts=True, dspark_taps=False)


def costs_of(config: ModelConfig, stages: tuple[StageSpec, ...]) -> dict[str, StageCost]:
    sizes = symbol_limits(config, Limits())
    return {stage.name: stage_cost(stage, config, sizes, 1000) for stage in stages}


def layers(piece: tuple[StageSpec, ...]) -> list[int]:
    return [stage.layer_id for stage in piece if stage.layer_id is not None]


def test_pieces_of_the_released_model() -> None:
    config, stages = chain("released")
    pieces = pieces_of(stages, config)
    expected = [range(2), range(2, 8), range(8, 14), range(14, 20), range(20, 40), range(0)]
    assert [layers(piece) for piece in pieces] == [list(ids) for ids in expected]
    assert pieces[0][0].name == "engram_hash"
    assert [stage.name for stage in pieces[-1]] == ["head"]


def test_balanced_placements_are_the_best_there_are() -> None:
    """Against all others, for random costs: the slowest device decides."""
    import numpy as np

    config, stages = chain("tiny")
    pieces = pieces_of(stages, config)
    random = np.random.default_rng(0)
    for _ in range(20):
        costs = {s.name: StageCost(held_bytes=1, read_bytes=int(random.integers(1, 10**8))) for s in stages}
        for count in range(1, len(pieces) + 1):
            deployment = DeploymentConfig(devices=tuple(f"cpu:{n}" for n in range(count)))
            placed = place(stages, config, deployment, costs)
            assert [range_.device for range_ in placed] == list(deployment.devices)
            assert [stage for range_ in placed for stage in range_.stages] == list(stages)

            def slowest(groups: list[list[StageSpec]], costs: dict[str, StageCost] = costs) -> float:
                return max(floor_seconds([costs[stage.name] for stage in group], "cpu") for group in groups)

            everything = []
            for cuts in combinations(range(1, len(pieces)), count - 1):
                ends = [0, *cuts, len(pieces)]
                everything.append(slowest([[s for piece in pieces[a:b] for s in piece] for a, b in pairwise(ends)]))
            assert slowest([list(range_.stages) for range_ in placed]) == min(everything)


def test_the_head_counts() -> None:
    """A vocabulary as heavy as all blocks gets a device of its own."""
    config, stages = chain("tiny")
    costs = {s.name: StageCost(held_bytes=0, read_bytes=10**9 if s.name == "head" else 1) for s in stages}
    placed = place(stages, config, DeploymentConfig(devices=("cuda:0", "cuda:1")), costs)
    assert [stage.name for stage in placed[1].stages] == ["head"]


def test_costs_count_activated_experts_and_held_caches() -> None:
    config, stages = chain("tiny")
    block = next(stage for stage in stages if stage.layer_id == 2)
    small, large = (stage_cost(block, config, symbol_limits(config, Limits(max_context=n)), 10, 0) for n in (128, 4096))
    experts = 3 * config.n_routed_experts * config.dim * config.moe_inter_dim * (1 / 2 + 1 / 32)
    assert small.read_bytes == large.read_bytes == 10 + experts * config.n_activated_experts / config.n_routed_experts
    assert large.held_bytes > small.held_bytes > 10 + experts


def test_a_deployment_decides() -> None:
    config, stages = chain("tiny")
    entries = (
        StagePlacement(device="cpu:0", layers=(0, 5)),
        StagePlacement(device="cpu:1", layers=(6, 11)),
        StagePlacement(device="cpu:2", layers=()),
    )
    devices = ("cpu:0", "cpu:1", "cpu:2")
    placed = place(stages, config, DeploymentConfig(devices=devices, stages=entries), costs_of(config, stages))
    assert [layers(range_.stages) for range_ in placed] == [list(range(6)), list(range(6, 12)), []]
    assert [stage.name for stage in placed[2].stages] == ["head"]
    placed = place(stages, config, DeploymentConfig(devices=devices[:2], stages=entries[:2]), costs_of(config, stages))
    assert [range_.stages[-1].name for range_ in placed] == ["block_05", "head"]


def test_more_devices_than_pieces() -> None:
    config, stages = chain("tiny")
    deployment = DeploymentConfig(devices=tuple(f"cpu:{n}" for n in range(6)))
    with pytest.raises(DeploymentError, match="6 devices; expected at most 5"):
        place(stages, config, deployment, costs_of(config, stages))


@pytest.mark.parametrize(("cut", "nearest"), [(1, 2), (3, 2), (5, 4), (7, 6), (11, 6)])
def test_a_cut_inside_a_group_names_the_nearest_good_one(cut: int, nearest: int) -> None:
    config, stages = chain("tiny")
    entries = (StagePlacement(device="cpu:0", layers=(0, cut - 1)), StagePlacement(device="cpu:1", layers=(cut, 11)))
    deployment = DeploymentConfig(devices=("cpu:0", "cpu:1"), stages=entries)
    with pytest.raises(
        DeploymentError, match=rf"before layer {cut}, inside a group.*nearest is before layer {nearest}"
    ):
        place(stages, config, deployment, costs_of(config, stages))


def test_a_deployment_of_another_model() -> None:
    config, stages = chain("tiny")
    entries = (StagePlacement(device="cpu:0", layers=(0, 19)), StagePlacement(device="cpu:1", layers=(20, 39)))
    deployment = DeploymentConfig(devices=("cpu:0", "cpu:1"), stages=entries)
    with pytest.raises(DeploymentError, match=r"39 as the last layer; expected 11.*another model"):
        place(stages, config, deployment, costs_of(config, stages))


def test_a_cache_that_would_cross_is_no_piece() -> None:
    """The rule of the config and the interfaces of the stages must say the same."""
    config, stages = chain("tiny")
    reader = next(stage for stage in stages if stage.layer_id == 4)
    stolen = next(spec for stage in stages if stage.layer_id == 3 for spec in stage.inputs if spec.owner == 2)
    wrong = replace(reader, inputs=(*(s for s in reader.inputs if s.name != stolen.name), stolen), outputs=())
    with pytest.raises(ValueError, match=r"layers\.2\.compressed_kv.*would cross the boundary"):
        pieces_of(tuple(wrong if stage is reader else stage for stage in stages), config)
