"""Which experts either side chose, in one step of every block.

A block does not put its choice out. The exported file shows it under ONNX Runtime, on what the candidate was given;
the reference's is the eager module's, on what the reference was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engram_trt.export.accuracy.divergence.findings import Agreement
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.stage_graph import StageGraph
from engram_trt.export.accuracy.divergence.ties import Choices
from engram_trt.runtime.stage_runners.contract import Array

OP = "MoEExperts"


def chosen_experts(scores: Array, count: int) -> Array:
    """Ids of the highest biased scores, higher score first, then lower id: [n, experts] -> [n, count], ascending."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.sort(order, axis=1)


def gate_agreement(file: Path, inputs: Mapping[str, Array], choices: Choices, places: Places, tie: float) -> Agreement:
    """Compare the choices of one block.

    Args:
        file: of the stage.
        inputs: every input as the candidate had it, weights included.
        choices: of the reference.
        places: of the step's tokens.
        tie: accepted gap of scores.
    """
    graph = StageGraph(file)
    anchor = next(anchor for anchor in graph.anchors if anchor.op_type == OP)
    names = [name for name in anchor.inputs[1:3] if name not in graph.weights]
    values = graph.values(names, inputs)
    rows, bias = (values.get(name, graph.weight(name)) for name in anchor.inputs[1:3])
    if rows is None or bias is None:
        return Agreement()
    reference = places.of(choices.scores["experts"])
    found = places.of((rows + bias).reshape(choices.scores["experts"].shape))
    count = choices.experts_per_token
    same = (chosen_experts(reference, count) == chosen_experts(found, count)).all(axis=1)
    tied = choices.experts_tied(places, tie) & ~same
    return Agreement(same=int(same.sum()), tied=int(tied.sum()), compared=len(same))
