"""Level `op`: every op node of every stage against its torch reference, on the node's own real inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from engram_trt.export.accuracy.divergence.chains import widened
from engram_trt.export.accuracy.divergence.deviation import Deviation, deviation, worst_coordinates
from engram_trt.export.accuracy.divergence.findings import Finding, Outcome, PointFinding, Track
from engram_trt.export.accuracy.divergence.limits import EXACT, Limit, Limits
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.prompts import PromptSet
from engram_trt.export.accuracy.divergence.reference_ops import indexer_scores, reference_outputs
from engram_trt.export.accuracy.divergence.stage_graph import Anchor, StageGraph
from engram_trt.export.accuracy.divergence.stepping import SteppedSession
from engram_trt.export.accuracy.divergence.ties import Choices
from engram_trt.plugins.registry import spec_of
from engram_trt.plugins.spec import PluginSpec
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array

NUM_ROWS = 4
NUM_DECODE = 2

Progress = Callable[[str, int, int], None]
LISTS = {"topk_indices": "topk_indices", "candidate_blocks_out": "candidate_blocks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Inputs of one stage in one step of the reference chain."""

    stage: str
    step: int
    inputs: Mapping[str, Array]


def compare_ops(
    artifact: Artifact,
    reference: Engine,
    prompts: PromptSet,
    limits: Limits,
    stages: tuple[str, ...],
    outcome: Outcome,
    progress: Progress,
) -> None:
    """Compare the ops of all stages, or of some; `outcome` receives what is found.

    Args:
        artifact: has the files; each op node is looked at under ONNX Runtime.
        reference: the chain that real inputs come from.
        prompts: the longest few are fed.
        limits: of the comparison.
        stages: names; empty for one stage of every kind.
        outcome: of the back end.
        progress: told (text, done, total).
    """
    records = {record.spec.name: record for record in artifact.manifest.stages}
    chosen = stages or tuple({record.spec.kind: name for name, record in reversed(records.items())}.values())
    graphs = {name: StageGraph(artifact.root / records[name].onnx.path) for name in chosen}
    total = len(chosen) * (2 + NUM_DECODE)
    for done, feed in enumerate(real_feeds(reference, prompts, frozenset(chosen))):
        progress(f"ops of {feed.stage}", done, total)
        spec = records[feed.stage].spec
        weights = {item.name: artifact.resident(spec, item.name) for item in spec.inputs if item.role == "resident"}
        _compare_stage(graphs[feed.stage], feed, {**feed.inputs, **weights}, limits, outcome)
        outcome.steps = feed.step + 1


def real_feeds(engine: Engine, prompts: PromptSet, stages: frozenset[str]) -> Iterator[Feed]:
    """What stages get while the chain runs a few rows: two prefill steps of rows of different lengths, then decode."""
    wide = widened(engine)
    session = SteppedSession(wide)
    rows = sorted(prompts.prompts, key=lambda prompt: -len(prompt.ids))[: min(NUM_ROWS, session.limits.max_batch)]
    for _ in rows:
        session.add()
    half = max(rows[0].num_prompt // 2, 1)
    cuts = [(0, half), (half, 2 * half)]
    cuts += [(2 * half + i, 2 * half + i + 1) for i in range(NUM_DECODE)]
    for number, (start, stop) in enumerate(cuts):
        tokens = {
            row: prompt.ids[start : min(stop, start + session.limits.max_step_tokens)]
            for row, prompt in enumerate(rows)
        }
        fed = {row: part for row, part in tokens.items() if part and session.length(row) == start}
        if not fed:
            continue
        step = session.open_step(fed)
        ids: dict[int | None, Array] = {}
        for call in step.calls:
            call.run()
            ids |= {
                spec.owner: np.array(call.read(spec.name)) for spec in call.spec.outputs if spec.tensor == "engram_ids"
            }
            if call.spec.name in stages:
                feed = call.feed()
                if "engram_ids" in call.spec.input_names:
                    feed["engram_ids"] = ids[call.spec.layer_id]
                yield Feed(stage=call.spec.name, step=number, inputs=feed)
        step.commit()


def _compare_stage(
    graph: StageGraph, feed: Feed, inputs: Mapping[str, Array], limits: Limits, outcome: Outcome
) -> None:
    ops = [anchor for anchor in graph.anchors if anchor.op_type]
    names = [name for anchor in ops for name in (*anchor.inputs, *anchor.outputs) if name]
    values = {**inputs, **graph.values(names, inputs)}
    for anchor in ops:
        operands = [None if not name else values.get(name, graph.weight(name)) for name in anchor.inputs]
        if any(name and operand is None for name, operand in zip(anchor.inputs, operands, strict=True)):
            outcome.notes.append(f"{feed.stage}: an input of {anchor.label} could not be read")
            continue
        wants = reference_outputs(anchor.op_type, operands, anchor.attributes)
        spec = spec_of(anchor.op_type)
        for operand, want, name in zip(spec.outputs, wants, anchor.outputs, strict=False):
            if not name:
                continue
            got, limit = values[name], _limit(spec, want, limits)
            found = _deviation(want, got, limit)
            if operand.name in LISTS and found.wrong.any():
                found = _without_ties(anchor, operands, LISTS[operand.name], want, got, found, limits)
            _note(outcome, feed, anchor, operand.name, want, got, found, limit)


def _limit(spec: PluginSpec, values: Array, limits: Limits) -> Limit:
    is_exact = spec.tolerance.atol == 0 and spec.tolerance.rtol == 0
    return EXACT if is_exact else limits.inside(values)


def _flat(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1])


def _deviation(want: Array, got: Array, limit: Limit) -> Deviation:
    return deviation(_flat(want), _flat(got), limit)


def _without_ties(
    anchor: Anchor,
    operands: list[Array | None],
    name: str,
    want: Array,
    got: Array,
    found: Deviation,
    limits: Limits,
) -> Deviation:
    choices = Choices(scores=indexer_scores(operands, anchor.attributes), experts_per_token=0)
    rows, slots = (axis.reshape(-1) for axis in np.indices(want.shape[:2]))
    places = Places(rows=rows, slots=slots, positions=slots)
    tied = choices.lists_tied(name, _flat(want), _flat(got), places, limits.tie)
    return replace(found, wrong=found.wrong & ~tied)


def _note(
    outcome: Outcome, feed: Feed, anchor: Anchor, output: str, want: Array, got: Array, found: Deviation, limit: Limit
) -> None:
    key = f"{anchor.op_type}.{output} in {feed.stage}"
    track = outcome.tracks.setdefault(key, Track(limit=limit))
    none = np.zeros_like(found.wrong)
    track.add(found, found.wrong, none, [])
    outcome.tokens += len(found.wrong)
    if not found.wrong.any() or any(
        item.stage == feed.stage and item.tensor == f"{anchor.label}.{output}" for item in outcome.findings
    ):
        return
    width = want.shape[1] if want.ndim > 2 else 1
    index = np.arange(len(found.wrong))
    places = Places(rows=index // width, slots=index % width, positions=index % width)
    outcome.findings.append(
        Finding(
            level="op",
            backend=outcome.backend,
            stage=feed.stage,
            tensor=f"{anchor.label}.{output}",
            step=feed.step,
            kind=found.kind,
            error=float(found.errors[found.wrong].max()),
            limit=limit,
            num_wrong=int(found.wrong.sum()),
            num_tokens=len(found.wrong),
            cause="own",
            worst=worst_coordinates(_flat(want), _flat(got), places, found.wrong),
            point=PointFinding(op=anchor.label, tensor=output, error=found.worst, note="the op alone, on equal inputs"),
        )
    )
