"""Outputs of a chain in a file of Polygraphy's own format, so that one machine's are compared on another.

The file is a `RunResults`. Its first iteration has one output more, `provenance`: the artefact, the prompts and the
level as JSON in bytes, checked when the file is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from polygraphy.comparator import IterationResult, RunResults
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

from engram_trt.configs.errors import RequestError
from engram_trt.configs.tensors import TensorSpec
from engram_trt.export.accuracy.divergence.deviation import Deviation, deviation, worst_coordinates
from engram_trt.export.accuracy.divergence.findings import Finding, Outcome, Track
from engram_trt.export.accuracy.divergence.limits import EXACT, Limit, Limits
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.prompts import PromptSet
from engram_trt.export.accuracy.divergence.runners import ChainRunner, chain_feeds
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array

PROVENANCE = "provenance"
PLACES = ("rows", "positions", "logit_rows")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What saved outputs belong to.

    Args:
        artifact_sha256: of the artefact's manifest.
        prompts_sha256: of the prompts' ids.
        level: `chain` for every stage, `tokens` for logits.
    """

    artifact_sha256: str
    prompts_sha256: str
    level: str

    def encoded(self) -> Array:
        """As an output: uint8 bytes of JSON."""
        return np.frombuffer(json.dumps(asdict(self)).encode(), dtype=np.uint8).copy()


def run_chain(engine: Engine, prompts: PromptSet, only_logits: bool) -> Iterator[Mapping[str, Array]]:
    """Outputs of a chain, step by step."""
    with ChainRunner(engine, only_logits=only_logits) as runner:
        for feed in chain_feeds(prompts, engine):
            yield runner.infer(feed, check_inputs=False)


def save_outputs(path: Path, name: str, steps: Iterable[Mapping[str, Array]], provenance: Provenance) -> None:
    """Write the outputs of a chain.

    Args:
        path: the file.
        name: of the runner.
        steps: outputs, step by step.
        provenance: what they belong to.
    """
    iterations = []
    for number, outputs in enumerate(steps):
        named = dict(outputs) if number else {**outputs, PROVENANCE: provenance.encoded()}
        iterations.append(IterationResult(named, runtime=0.0, runner_name=name))
    with G_LOGGER.verbosity(G_LOGGER.ERROR):
        RunResults([(name, iterations)]).save(str(path))


def load_outputs(path: Path, expected: Provenance) -> tuple[str, list[Mapping[str, Array]]]:
    """Read a file of `save_outputs`: the runner's name, and its outputs step by step.

    Raises:
        RequestError: it is none, or of another artefact, other prompts or another level.
    """
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            results = RunResults.load(str(path))
        ((name, iterations),) = results.items()
        steps: list[dict[str, Array]] = [dict(iteration.items()) for iteration in iterations]
        found = json.loads(bytes(np.asarray(steps[0].pop(PROVENANCE), dtype=np.uint8)))
    except (PolygraphyException, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestError(
            str(path),
            found=f"no saved outputs ({type(error).__name__})",
            expected="a file that --save-outputs wrote",
            remedy="Save the outputs again.",
        ) from None
    for key, what in (("artifact_sha256", "artefact"), ("prompts_sha256", "prompts"), ("level", "level")):
        want = asdict(expected)[key]
        if found.get(key) != want:
            raise RequestError(
                str(path),
                found=f"outputs of another {what} ({str(found.get(key))[:12]})",
                expected=f"{want[:12]}",
                remedy="Compare with the artefact, the prompts and the level that the file was saved with.",
            )
    return str(name), list[Mapping[str, Array]](steps)


def compare_steps(
    reference: Iterable[Mapping[str, Array]],
    found: Iterable[Mapping[str, Array]],
    specs: Mapping[str, TensorSpec],
    limits: Limits,
    outcome: Outcome,
    progress: Progress,
    stop_at_first: bool,
) -> None:
    """Compare outputs that were computed apart; a difference cannot be taken back, so what follows it differs too.

    Args:
        reference, found: outputs of both sides, step by step.
        specs: `stage.tensor` -> what it is.
        limits: what is accepted.
        outcome: receives what is found.
        progress: told (text, done, total).
        stop_at_first: leave after the first step with a difference.
    """
    for number, (first, second) in enumerate(zip(reference, found, strict=True)):
        progress(f"{outcome.backend}: step {number + 1}", number, 0)
        if any(not np.array_equal(first[name], second.get(name, np.zeros(0))) for name in PLACES):
            raise RequestError(
                "saved outputs",
                found=f"other rows or positions in step {number}",
                expected="the steps of this comparison",
                remedy="Save both sides with the same version and limits of this package.",
            )
        outcome.steps += 1
        outcome.tokens += len(first["rows"])
        for name in first:
            if name not in PLACES:
                _compare_output(name, number, first, second, specs.get(name), limits, outcome)
        if outcome.findings and stop_at_first:
            return


def _compare_output(
    name: str,
    step: int,
    first: Mapping[str, Array],
    second: Mapping[str, Array],
    spec: TensorSpec | None,
    limits: Limits,
    outcome: Outcome,
) -> None:
    stage, _, tensor = name.rpartition(".")
    limit: Limit = limits.of(stage, spec) if spec is not None else EXACT
    want, got = first[name], second.get(name, np.zeros((0,), dtype=np.float32))
    found: Deviation = deviation(want, got, limit)
    places = _places(first, want.shape[0])
    track = outcome.tracks.setdefault(name, Track(limit=limit))
    track.add(found, found.wrong, np.zeros_like(found.wrong), places.positions.tolist())
    if found.wrong.any():
        outcome.findings.append(
            Finding(
                level=outcome.level,
                backend=outcome.backend,
                stage=stage,
                tensor=tensor,
                step=step,
                kind=found.kind,
                error=float(found.errors[found.wrong].max()),
                limit=limit,
                num_wrong=int(found.wrong.sum()),
                num_tokens=len(found.wrong),
                worst=worst_coordinates(want, got, places, found.wrong),
            )
        )


def _places(step: Mapping[str, Array], count: int) -> Places:
    """Rows and positions of an output's tokens: all of the step's, or the last of each row."""
    if count == len(step["rows"]):
        return Places(rows=step["rows"], slots=step["rows"], positions=step["positions"])
    if count == len(step["logit_rows"]):
        ends = [int(step["positions"][step["rows"] == row].max()) for row in step["logit_rows"]]
        return Places(rows=step["logit_rows"], slots=step["logit_rows"], positions=np.array(ends, dtype=np.int64))
    index = np.arange(count)
    return Places(rows=np.full(count, -1), slots=index, positions=index)
