"""Inputs a text seldom or never brings about, made from the real inputs of a stage.

Zeros decide between an epsilon and NaN, reach the floor of the Engram gate and make exact ties; small streams show an
epsilon that is too large; an image span takes another bias and shuts the Engram gate; positions far out show how an
angle is computed; experts with projections eight times as large reach the clamps of their activation.
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

SMALL = np.float32(2.0**-20)
MILLION = 1_000_003

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
    """Variants of a stage's inputs, as far as it has the inputs in question.

    Args:
        stage: the stage.
        feed: its carried inputs.
        resident: its weights as they are stored.
    """
    if "hidden_states" in feed:
        yield Edge(name="streams of zeros", changed={"hidden_states": np.zeros_like(feed["hidden_states"])})
        yield Edge(name="streams a millionth as large", changed={"hidden_states": feed["hidden_states"] * SMALL})
    if "image_mask" in feed:
        yield Edge(name="every other token in an image", changed=_image(feed))
    if "start_positions" in feed and not any(spec.role == "state" for spec in stage.inputs):
        yield Edge(name="positions from a million on", changed={"start_positions": feed["start_positions"] + MILLION})
    loud = _loud_experts(resident)
    if loud:
        yield Edge(name="experts eight times as loud", changed=loud)


def _image(feed: Mapping[str, Array]) -> dict[str, Array]:
    mask = np.zeros_like(feed["image_mask"])
    mask[:, 1::2] = True
    changed: dict[str, Array] = {"image_mask": mask}
    if "image_embeddings" in feed:
        rows = feed["image_embeddings"]
        changed["image_embeddings"] = np.cos(np.arange(rows.size, dtype=np.float32)).reshape(rows.shape)
    return changed


def _loud_experts(resident: Mapping[str, Array]) -> dict[str, Array]:
    loud: dict[str, Array] = {}
    for weight, scale in zip(EXPERT_WEIGHTS[::2], EXPERT_SCALES[::2], strict=True):  # w1 and w3
        if scale in resident and resident[scale].nbytes <= LARGEST_BYTES:
            exponents = resident[scale].view(np.uint8).astype(np.int32) + LOUDER
            loud[scale] = np.minimum(exponents, LARGEST_EXPONENT).astype(np.uint8).view(np.int8)
        elif scale not in resident and weight in resident and resident[weight].nbytes <= LARGEST_BYTES:
            loud[weight] = resident[weight] * np.float32(2**LOUDER)
    return loud
