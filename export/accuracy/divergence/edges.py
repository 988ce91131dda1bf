"""Inputs a text seldom or never brings about, made from the real inputs of a stage.

A row of zeros decides between the epsilons and NaN, reaches the floor of the Engram gate and makes exact ties; experts
whose projections are eight times as large reach the clamps of their activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.moe import EXPERT_SCALES, EXPERT_WEIGHTS
from engram_trt.runtime.stage_runners.contract import Array

LOUDER = 3
"""Added to the exponents of the gate and up projections: a factor of eight."""

LARGEST_EXPONENT = 254
"""Of an E8M0 byte; 255 is NaN."""

LARGEST_BYTES = 256 << 20
"""Experts beyond this size are not copied for a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A variant of a stage's inputs.

    Args:
        name: for a report.
        changed: input -> its values.
    """

    name: str
    changed: Mapping[str, Array]


def edges(stage: StageSpec, feed: Mapping[str, Array], resident: Mapping[str, Array]) -> Iterator[Edge]:
    """Variants for a block; none for other stages.

    Args:
        stage: the stage.
        feed: its carried inputs.
        resident: its weights as they are stored.
    """
    if stage.layer_id is None:
        return
    yield Edge(name="streams of zeros", changed={"hidden_states": np.zeros_like(feed["hidden_states"])})
    loud: dict[str, Array] = {}
    for weight, scale in zip(EXPERT_WEIGHTS[::2], EXPERT_SCALES[::2], strict=True):  # w1 and w3
        if scale in resident and resident[scale].nbytes <= LARGEST_BYTES:
            exponents = resident[scale].view(np.uint8).astype(np.int32) + LOUDER
            loud[scale] = np.minimum(exponents, LARGEST_EXPONENT).astype(np.uint8).view(np.int8)
        elif scale not in resident and weight in resident and resident[weight].nbytes <= LARGEST_BYTES:
            loud[weight] = resident[weight] * np.float32(2**LOUDER)
    if loud:
        yield Edge(name="experts eight times as loud", changed=loud)
