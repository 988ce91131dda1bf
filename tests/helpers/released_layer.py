"""One exported layer on its own: a prefill and a decode step through ONNX Runtime, and the same in eager torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.limits import Limits, symbol_limits
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource, mapped_tensor
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.rotary import inverse_frequencies, rotary_table
from engram_trt.export.stages.chain import load_stage, stage_module
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

Feed = dict[str, npt.NDArray[np.generic]]
LIMITS = Limits(max_batch=1, max_step_tokens=16, max_context=64, max_rollback=4)
STEPS = (16, 1)
"""Tokens of a prefill step and of the decode step behind it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step of one implementation gave, and how long it took."""

    tokens: int
    outputs: Mapping[str, npt.NDArray[np.generic]]
    seconds: float


def step_feeds(artifact: Artifact, spec: StageSpec) -> Iterator[tuple[int, Feed]]:
    """Inputs of the steps that the session or an earlier stage would fill; states are the runner's own."""
    config = artifact.config
    layer = config.layer(spec.layer_id or 0)
    random, start = np.random.default_rng(7), 0
    for tokens in STEPS:
        positions = torch.arange(start, start + tokens).unsqueeze(0)
        table = rotary_table(positions, inverse_frequencies(config, layer.compress_ratio))
        feed: Feed = {}
        for tensor in spec.inputs:
            shape = tensor.resolve({**symbol_limits(config, LIMITS), "batch": 1, "tokens": tokens, "table_rows": 0})
            if tensor.name == "start_positions":
                feed[tensor.name] = np.array([start], dtype=np.int64)
            elif tensor.name.endswith(("_cos", "_sin")):
                feed[tensor.name] = table[tensor.name.endswith("_sin")].numpy()
            elif tensor.name.startswith("visible_entries"):
                feed[tensor.name] = np.arange(shape[0], dtype=np.int64)
            elif tensor.name == "hidden_states":
                feed[tensor.name] = random.standard_normal(shape, dtype=np.float32)
            elif tensor.name == "pre_mix":
                feed[tensor.name] = np.abs(random.standard_normal(shape, dtype=np.float32))
            elif tensor.name == "engram_ids":
                feed[tensor.name] = engram_ids(artifact.resident(spec, "engram_rows").shape[0], shape, tokens)
            elif tensor.name == "image_mask":
                feed[tensor.name] = np.zeros(shape, dtype=np.bool_)
            elif tensor.name in ("topk_indices", "candidate_blocks"):
                last = max((start + tokens) // max(layer.compress_ratio, 1), 1)
                feed[tensor.name] = np.where(np.arange(shape[-1]) < last, np.arange(shape[-1]), -1).astype(np.int32)
                feed[tensor.name] = np.broadcast_to(feed[tensor.name], shape).copy()
        start += tokens
        yield tokens, feed


def engram_ids(num_rows: int, shape: tuple[int, ...], tokens: int) -> npt.NDArray[np.int64]:
    """Rows of a table that a step of so many tokens reads, [1, tokens, columns]."""
    return np.random.default_rng(tokens).integers(0, num_rows, shape, dtype=np.int64)


def fill_table_rows(folder: Path) -> None:
    """Write random values to those rows of a checkpoint's tables that the steps read; tables are left as holes.

    Codes stay below 0x70, where no E4M3 value is NaN, and scales near one.
    """
    checkpoint, random = Checkpoint.open(folder), np.random.default_rng(5)
    config = checkpoint.config
    for layer_id in set(config.engram_layer_ids) & set(checkpoint.partial_layers or ()):
        entries = [checkpoint.entry(f"layers.{layer_id}.engram.embed.{part}") for part in ("weight", "scale")]
        for entry, (low, high) in zip(entries, ((0, 0x70), (124, 128)), strict=True):
            rows, width = entry.shape
            with entry.shard.open("r+b") as file:
                for tokens in STEPS:
                    for row in engram_ids(rows, (1, tokens, config.engram_columns), tokens).reshape(-1):
                        file.seek(entry.offset + int(row) * width)
                        file.write(random.integers(low, high, width, dtype=np.uint8).tobytes())


def run_onnxruntime(artifact: Artifact, spec: StageSpec) -> list[StepResult]:
    """All steps in one session; caches are updated in place, experts are bound as the artefact has them."""
    files = {record.spec.name: artifact.root / record.onnx.path for record in artifact.manifest.stages}
    backend = OnnxRuntimeBackend(files, artifact.resident)
    runner = backend.load(spec)
    limits = symbol_limits(artifact.config, LIMITS)
    sizes = {**limits, "batch": 1}
    buffers = {
        tensor.key: backend.allocate(tensor.dtype, int(np.prod(tensor.resolve(limits))))
        for tensor in (*spec.inputs, *spec.outputs)
        if tensor.role != "resident"
    }
    replaced = {t.key: backend.allocate(t.dtype, buffers[t.key].num_elements) for t in spec.outputs if t.alias is None}
    results = []
    for tokens, feed in step_feeds(artifact, spec):
        step_sizes, views = {**sizes, "tokens": tokens}, {}
        for tensor in spec.inputs:
            if tensor.role == "resident":
                views[tensor.name] = backend.resident(spec, tensor.name)
                continue
            views[tensor.name] = buffers[tensor.key].view(tensor.resolve(step_sizes))
            if tensor.name in feed:
                views[tensor.name].write(feed[tensor.name])
        for tensor in spec.outputs:
            home = buffers if tensor.alias is not None else replaced
            views[tensor.name] = home[tensor.key].view(tensor.resolve(step_sizes))
        run = runner.bind(views)
        started = perf_counter()
        run()
        seconds = perf_counter() - started
        outputs = {tensor.name: np.array(views[tensor.name].read()) for tensor in spec.outputs}
        results.append(StepResult(tokens=tokens, outputs=outputs, seconds=seconds))
    return results


@torch.no_grad()
def run_eager(artifact: Artifact, spec: StageSpec) -> list[StepResult]:
    """The same steps in the torch module, whose reference takes one chosen expert after the other."""
    source = CheckpointSource(checkpoint=artifact.checkpoint)
    compute = ComputeConfig.from_deployment(artifact.manifest.deployment)
    module = stage_module(spec, artifact.config, compute, None)
    load_stage(module, spec, source)
    source.drop_pages()
    limits = symbol_limits(artifact.config, LIMITS)
    states = {
        tensor.name: torch.zeros(tensor.resolve({**limits, "batch": 1}))
        for tensor in spec.inputs
        if tensor.role == "state"
    }
    resident = {
        tensor.name: mapped_tensor(artifact.resident(spec, tensor.name))
        for tensor in spec.inputs
        if tensor.role == "resident"
    }
    results = []
    for tokens, feed in step_feeds(artifact, spec):
        inputs = {**states, **resident, **{name: torch.from_numpy(values) for name, values in feed.items()}}
        started = perf_counter()
        values = module(inputs, spec.output_names)
        seconds = perf_counter() - started
        outputs = dict(zip(spec.output_names, values, strict=True))
        states.update({t.alias: outputs[t.name] for t in spec.outputs if t.alias is not None})
        results.append(
            StepResult(tokens=tokens, outputs={k: v.numpy().copy() for k, v in outputs.items()}, seconds=seconds)
        )
    return results


def largest_difference(first: list[StepResult], second: list[StepResult]) -> float:
    """Over all float outputs, relative to the output's own root mean square; lists and shapes must be equal."""
    worst = 0.0
    for ours, theirs in zip(first, second, strict=True):
        for name, values in ours.outputs.items():
            other = theirs.outputs[name]
            if values.dtype != np.float32:
                np.testing.assert_array_equal(values, other, err_msg=name)
                continue
            scale = float(np.sqrt(np.mean(np.square(other)))) or 1.0
            worst = max(worst, float(np.max(np.abs(values - other))) / scale)
    return worst


def peak_bytes() -> int:
    """The most this program ever had in memory, mapped pages included."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def run_stacked(folder: Path) -> dict[str, object]:
    """The steps through ONNX Runtime alone, experts as the artefact binds them."""
    artifact = Artifact.open(folder, verify="none")
    (spec,) = [spec for spec in artifact.stages if spec.layer_id is not None]
    steps = run_onnxruntime(artifact, spec)
    return {"step_s": {str(step.tokens): round(step.seconds, 3) for step in steps}}


def check_layer(folder: Path) -> dict[str, object]:
    """Run both over the artefact's one block; facts for a record."""
    artifact = Artifact.open(folder, verify="none")
    (spec,) = [spec for spec in artifact.stages if spec.layer_id is not None]
    ours = run_onnxruntime(artifact, spec)
    peak_onnxruntime = peak_bytes()
    theirs = run_eager(artifact, spec)
    return {
        "stage": spec.name,
        "largest_difference": largest_difference(ours, theirs),
        "peak_onnxruntime_bytes": peak_onnxruntime,
        "peak_bytes": peak_bytes(),
        "step_s": {str(step.tokens): round(step.seconds, 3) for step in ours},
        "eager_step_s": {str(step.tokens): round(step.seconds, 3) for step in theirs},
    }
