"""`--calibrate`: the model's own noise, tensor by tensor, and limits that follow from it.

Two correct computations of one model differ by what reordering and rounding do to it: other chunks, other kernels for
its products, another number of threads, and, for a bfloat16 artefact, float32 instead. All are the eager modules, so
that no fault of a back end can hide in its own limit.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.divergence.deviation import root_mean_square
from engram_trt.export.accuracy.divergence.places import StepPlaces
from engram_trt.export.accuracy.divergence.prompts import Prompt, PromptSet, default_prompts
from engram_trt.export.accuracy.divergence.stepping import SteppedSession
from engram_trt.export.accuracy.divergence.ties import SCORES_OF
from engram_trt.export.accuracy.divergence.tolerances import Measured
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.torch_runner import torch_engine
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array
from engram_trt.runtime.token_map import TokenMap

FACTOR = 8.0
"""Limit over noise: another back end reorders everywhere at once, and the largest of more tokens is larger."""

SMALLEST = 5e-6
"""No limit is below some forty float32 roundings, also where two computations agreed to the bit."""

NUM_PROMPTS, NUM_DECODE = 12, 8
STRIDE = 1 << 32
"""Above any position: row * STRIDE + position names a token."""

Observation = Mapping[str, tuple[npt.NDArray[np.int64], Array]]
"""`stage.tensor` -> token keys, ascending, and values [n, ...]."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another correct way to compute the same.

    Args:
        name: for the record.
        chunks: tokens a step.
        context: in force while it runs.
        dtype: of the modules; empty for the artefact's.
    """

    name: str
    chunks: int
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    dtype: str = ""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Products without oneDNN: other blocking, another order of every sum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of other machines' units when the switch is touched
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def variants(dtype: str, max_step_tokens: int) -> tuple[Variant, ...]:
    """What is computed; the first is what the others are held against."""
    whole = max_step_tokens
    found = (
        Variant(name="whole steps", chunks=whole),
        Variant(name="one token a step", chunks=1),
        Variant(name="seven tokens a step", chunks=7),
        Variant(name="other kernels", chunks=whole, context=_plain_kernels),
        Variant(name="other threads", chunks=whole, context=lambda: _threads(1 if torch.get_num_threads() > 1 else 2)),
    )
    return (*found, Variant(name="float32", chunks=whole, dtype="float32")) if dtype == "bfloat16" else found


def calibrate(artifact: Artifact, progress: Progress) -> tuple[dict[str, Measured], dict[str, object]]:
    """Measure; limits by `stage.tensor`, and how they were measured.

    Args:
        artifact: an artefact with a checkpoint.
        progress: told (text, done, total).

    Raises:
        RequestError: choices flip in every row, so that nothing is left to measure.
    """
    limits = artifact.manifest.deployment.limits
    prompts = default_prompts(artifact.tokenizer(), artifact.config, limits, NUM_PROMPTS, NUM_DECODE)
    kinds = variants(artifact.manifest.deployment.dtype, limits.max_step_tokens)
    first = _observe(artifact, kinds[0], prompts)
    measured: dict[str, Measured] = {}
    dropped = {}
    for number, variant in enumerate(kinds[1:], 1):
        progress(f"{variant.name} against {kinds[0].name}", number, len(kinds))
        noise, rows = noise_between(first, _observe(artifact, variant, prompts))
        dropped[variant.name] = rows
        for key, value in noise.items():
            if key not in measured or value > measured[key].noise:
                limit = max(FACTOR * value, SMALLEST)
                measured[key] = Measured(noise=value, by=f"{variant.name} against {kinds[0].name}", limit=limit)
    how: dict[str, object] = {
        "pairs": [f"{variant.name} against {kinds[0].name}" for variant in kinds[1:]],
        "back end": "torch",
        "factor": FACTOR,
        "smallest": SMALLEST,
        "prompts": {"source": prompts.source, "count": len(prompts.prompts), "sha256": prompts.digest},
        "rows dropped because a choice flipped": dropped,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    return measured, how


def noise_between(first: Observation, second: Observation) -> tuple[dict[str, float], int]:
    """Largest error of every float tensor, relative to its root mean square, over rows whose choices are the same.

    Returns:
        noise by `stage.tensor`; how many rows were left out.
    """
    flipped: set[int] = set()
    for key, (tokens, values) in first.items():
        if key.partition(".")[2] in SCORES_OF:
            common, left, right = np.intersect1d(tokens, second[key][0], return_indices=True)
            differs = (values[left] != second[key][1][right]).any(axis=1)
            flipped |= {int(token) // STRIDE for token in common[differs]}
    noise = {}
    for key, (tokens, values) in first.items():
        common, left, right = np.intersect1d(tokens, second[key][0], return_indices=True)
        kept = ~np.isin(common // STRIDE, list(flipped))
        want, got = values[left][kept], second[key][1][right][kept]
        if want.dtype.kind == "f" and want.size:
            noise[key] = float(np.abs(want - got).max()) / root_mean_square(want)
    if not noise:
        raise RequestError(
            "--calibrate",
            found="choices that flip in every row",
            expected="rows that two correct computations choose alike in",
            remedy="Calibrate an artefact without rounding of activations and caches.",
        )
    return noise, len(flipped)


def _observe(artifact: Artifact, variant: Variant, prompts: PromptSet) -> Observation:
    deployment = artifact.manifest.deployment
    if variant.dtype:
        deployment = replace(deployment, dtype=variant.dtype)
    token_map = None
    if artifact.config.has_engram:
        token_map = torch.from_numpy(TokenMap.for_model(artifact.tokenizer(), artifact.config).ids.copy())
    with variant.context():
        engine = torch_engine(CheckpointSource(checkpoint=artifact.checkpoint), deployment, token_map)
        return observe(engine, prompts.prompts, variant.chunks)


def observe(engine: Engine, prompts: tuple[Prompt, ...], chunk: int) -> Observation:
    """Every output of every stage at every token of some rows; of a cache, what was written for the token."""
    session = SteppedSession(engine)
    width = session.limits.max_batch
    parts: dict[str, list[tuple[npt.NDArray[np.int64], Array]]] = {}
    for start in range(0, len(prompts), width):
        session.reset()
        group = prompts[start : start + width]
        for _ in group:
            session.add()
        for done in range(0, max(len(prompt.ids) for prompt in group), chunk):
            rows = {row: prompt.ids[done : done + chunk] for row, prompt in enumerate(group)}
            step = session.open_step({row: part for row, part in rows.items() if part})
            places = StepPlaces.of(step, engine.config, written_only=True)
            for call in step.calls:
                call.run()
                for spec in call.spec.outputs:
                    values = call.read(spec.name)
                    where = places.places(spec, values.shape)
                    tokens = (where.rows + start) * STRIDE + where.positions
                    parts.setdefault(f"{call.spec.name}.{spec.name}", []).append((tokens, np.array(where.of(values))))
            step.commit()
    return {key: _joined(items) for key, items in parts.items()}


def _joined(items: list[tuple[npt.NDArray[np.int64], Array]]) -> tuple[npt.NDArray[np.int64], Array]:
    tokens = np.concatenate([item[0] for item in items])
    order = np.argsort(tokens, kind="stable")
    return tokens[order], np.concatenate([item[1] for item in items])[order]
