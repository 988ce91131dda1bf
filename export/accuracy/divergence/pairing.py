"""Which call of an op in the eager module belongs to which node of the exported stage.

As a rule the k-th call is the k-th node. It is not where the exporter merged equal nodes, or where one side calls an op
more often than it should: then a node belongs to the first call that got the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engram_trt.export.accuracy.divergence.deviation import deviation
from engram_trt.export.accuracy.divergence.eager_points import Point
from engram_trt.export.accuracy.divergence.limits import EXACT, HAND_SET, Limit
from engram_trt.export.accuracy.divergence.stage_graph import Anchor
from engram_trt.runtime.stage_runners.contract import Array

SAME_INPUT = Limit(value=HAND_SET["float32"], origin="hand-set")


def paired(points: Mapping[Point, Array], anchors: Sequence[Anchor], values: Mapping[str, Array]) -> dict[Point, Array]:
    """The eager points under the labels of the nodes they belong to; calls that belong to none are left out.

    Args:
        points: of the eager module.
        anchors: of the exported stage.
        values: of the exported stage, by name.
    """
    nodes: dict[str, list[Anchor]] = {}
    for anchor in anchors:
        if anchor.op_type:
            nodes.setdefault(anchor.op_type, []).append(anchor)
    result = dict(points)
    for op_type, own in nodes.items():
        labels = list(dict.fromkeys(key[0] for key in points if key[0].partition("#")[0] == op_type))
        if len(labels) == len(own):
            continue
        result = {key: value for key, value in result.items() if key[0] not in labels}
        for anchor in own:
            label = next((label for label in labels if _same_input(points, label, anchor, values)), None)
            result |= {(anchor.label, key[1], key[2]): value for key, value in points.items() if key[0] == label}
    return result


def _same_input(points: Mapping[Point, Array], label: str, anchor: Anchor, values: Mapping[str, Array]) -> bool:
    want, got = points.get((label, "input", 0)), values.get(anchor.inputs[0])
    if want is None or got is None or want.shape != got.shape:
        return False
    limit = SAME_INPUT if want.dtype.kind == "f" else EXACT
    return not deviation(want.reshape(1, -1), got.reshape(1, -1), limit).wrong.any()
