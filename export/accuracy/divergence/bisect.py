"""From a divergent stage down to the op: both sides on equal inputs, point by point in the order of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engram_trt.export.accuracy.divergence.deviation import Deviation, deviation
from engram_trt.export.accuracy.divergence.eager_points import eager_points
from engram_trt.export.accuracy.divergence.findings import PointFinding
from engram_trt.export.accuracy.divergence.limits import EXACT, HAND_SET, Limits
from engram_trt.export.accuracy.divergence.lockstep import Divergence
from engram_trt.export.accuracy.divergence.outputs import without_flips
from engram_trt.export.accuracy.divergence.pairing import paired
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.reference_ops import reference_outputs
from engram_trt.export.accuracy.divergence.stage_graph import Anchor, StageGraph
from engram_trt.export.accuracy.divergence.ties import Explainer, inputs_for_eager
from engram_trt.plugins.registry import spec_of
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.stage_runners.contract import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A value both sides have: of an anchor, or an output of the stage."""

    anchor: Anchor | None
    side: str
    index: int
    value: str


def bisect_stage(artifact: Artifact, explainer: Explainer, divergence: Divergence, limits: Limits) -> PointFinding:
    """Name the first point inside a stage that leaves its limit while everything before it is within.

    Both sides get the reference's inputs. What is looked at is the exported file under ONNX Runtime: of an engine of
    another back end the inside cannot be seen, and if the file agrees with the eager module, the engine's build is
    what differs.

    Args:
        artifact: has the file.
        explainer: has the eager module.
        divergence: the first one of a comparison.
        limits: of floats, by dtype.
    """
    spec, stage = divergence.reference.spec, divergence.reference.spec.name
    record = {item.spec.name: item for item in artifact.manifest.stages}[stage]
    if spec.outputs[0].dtype == "bfloat16" or any(item.dtype == "bfloat16" for item in spec.inputs):
        return PointFinding(op=stage, tensor=divergence.finding.tensor, error=divergence.finding.error, note=_NO_BF16)
    graph = StageGraph(artifact.root / record.onnx.path)
    inputs = inputs_for_eager(divergence.feed, divergence.engram_ids)
    module = explainer.module(stage)
    eager, outputs = eager_points(module, explainer.tensors(spec, inputs), spec.output_names)
    weights = {item.name: artifact.resident(spec, item.name) for item in spec.inputs if item.role == "resident"}
    feed = {**weights, **inputs}
    points = _points(graph)
    values = graph.values([point.value for point in points], feed)
    eager = paired(eager, graph.anchors, {**feed, **values})
    chosen = None if divergence.finding.tensor.removesuffix("_out") in _CACHES else divergence.chosen
    for point in points:
        want = (
            outputs.get(point.value)
            if point.anchor is None
            else eager.get((point.anchor.label, point.side, point.index))
        )
        if want is None or point.value not in values:
            continue
        found = _compare(want, values[point.value], chosen, inputs, limits)
        if found is not None and found.wrong.any():
            return _name(graph, point, found, values, feed)
    return PointFinding(op=stage, tensor=divergence.finding.tensor, error=0.0, note=_FILE_AGREES)


_CACHES = ("window_kv", "compressed_kv", "index_keys", "kv_state", "score_state")
_NO_BF16 = "ONNX Runtime has no bfloat16 kernels for the CPU: the inside of this stage cannot be run"
_FILE_AGREES = "under ONNX Runtime the exported file agrees with the eager module: look at how the engine was built"


def _points(graph: StageGraph) -> list[_Point]:
    points = [
        _Point(anchor=anchor, side=side, index=index, value=value)
        for anchor in graph.anchors
        for side, names in (("input", anchor.inputs), ("output", anchor.outputs))
        for index, value in enumerate(names)
        if value and value not in graph.weights and (side == "output" or value not in graph.graph_inputs)
    ]
    # An output of the stage is looked at where the graph makes it, if an op does; otherwise at the end.
    known = {point.value for point in points if point.side == "output"}
    caches = [
        _Point(anchor=None, side="output", index=0, value=anchor.outputs[0])
        for anchor in graph.anchors
        if anchor.op_type == "CacheWrite" and anchor.outputs[0] in graph.graph_outputs
    ]
    placed: list[_Point] = []
    for point in points:
        placed.append(point)
        placed += [cache for cache in caches if cache.value == point.value and point.side == "output"]
    rest = [
        _Point(anchor=None, side="output", index=0, value=name) for name in graph.graph_outputs if name not in known
    ]
    return placed + rest


def _compare(
    want: Array, found: Array, chosen: Places | None, inputs: Mapping[str, Array], limits: Limits
) -> Deviation | None:
    """Tokens in question where the tensor has tokens, else all of it; None where the shapes do not fit."""
    if want.size != found.size:
        return None
    want = want.reshape(found.shape)
    batch, tokens = _step_shape(inputs)
    if chosen is not None and found.shape[:2] == (batch, tokens):
        want, found = chosen.of(want), chosen.of(found)
    elif chosen is not None and found.shape[:1] == (batch * tokens,):
        flat = chosen.rows * tokens + chosen.slots
        want, found = want[flat], found[flat]
    elif found.ndim > 1:
        want, found = want.reshape(-1, found.shape[-1]), found.reshape(-1, found.shape[-1])
    result = deviation(want, found, limits.inside(found))
    return without_flips(result) if limits.rounding else result


def _step_shape(inputs: Mapping[str, Array]) -> tuple[int, int]:
    name = "hidden_states" if "hidden_states" in inputs else "token_ids"
    return int(inputs[name].shape[0]), int(inputs[name].shape[1])


def _name(
    graph: StageGraph, point: _Point, found: Deviation, values: Mapping[str, Array], feed: Mapping[str, Array]
) -> PointFinding:
    maker = next((anchor for anchor in graph.anchors if point.value in anchor.outputs), None)
    if maker is None or point.side == "input":
        behind = point.anchor.label if point.anchor is not None else f"output {point.value}"
        tensor = _tensor_name(point.anchor, point) if point.anchor is not None else point.value
        return _between(graph, [point.value], behind, tensor, found)
    if not maker.op_type:
        return PointFinding(op=maker.label, tensor=_tensor_name(maker, point), error=found.worst, note=_MODULE)
    alone = _op_alone(maker, graph, {**feed, **values})
    if alone is not None and alone <= HAND_SET["float32"]:
        # The op is right on what it was given, so that what it was given is not: an input only one side shows.
        inner = [name for name in maker.inputs if name not in graph.weights and name not in graph.graph_inputs]
        return _between(graph, inner, maker.label, spec_of(maker.op_type).inputs[1].name, found)
    off = "could not be tried alone" if alone is None else f"alone is {alone:.1e} off its reference on equal inputs"
    return PointFinding(op=maker.label, tensor=_tensor_name(maker, point), error=found.worst, note=f"the op {off}")


_MODULE = "the module, on equal inputs"


def _between(graph: StageGraph, values: list[str], behind: str, tensor: str, found: Deviation) -> PointFinding:
    """The arithmetic between named points: what it starts from, where it ends, and its nodes."""
    sources: dict[str, None] = {}
    nodes: set[str] = set()
    for value in values:
        labels, types = graph.between(value)
        sources |= dict.fromkeys(labels)
        nodes |= set(types)
    label = f"between {', '.join(sources) or 'constants'} and {behind}"
    return PointFinding(op=label, tensor=tensor, error=found.worst, note=f"nodes: {', '.join(sorted(nodes))}")


def _tensor_name(anchor: Anchor, point: _Point) -> str:
    if not anchor.op_type:
        return f"{anchor.label} {point.side}"
    operands = spec_of(anchor.op_type).inputs if point.side == "input" else spec_of(anchor.op_type).outputs
    index = anchor.outputs.index(point.value) if point.anchor is None else point.index
    return operands[index].name


def _op_alone(anchor: Anchor, graph: StageGraph, known: Mapping[str, Array]) -> float | None:
    """Error of the op against its reference, on the very inputs it had in the file; None if one cannot be read."""
    inputs = [None if not name else known.get(name, graph.weight(name)) for name in anchor.inputs]
    if any(name and value is None for name, value in zip(anchor.inputs, inputs, strict=True)):
        return None
    wants = reference_outputs(anchor.op_type, inputs, anchor.attributes)
    errors = [0.0]
    for want, name in zip(wants, anchor.outputs, strict=False):
        if name:
            got = known[name]
            flat = want.reshape(-1, want.shape[-1]), got.reshape(-1, got.shape[-1])
            errors.append(deviation(*flat, EXACT).worst if name in known else 0.0)
    return max(errors)
