"""The tiny model as TensorRT engines on this machine's GPU, against eager torch: a part of `gpu_check.py`.

Synthesises, exports, builds (kernels included), then feeds one prompt in uneven steps and decodes, so that prefill,
eager decode, capture and replay are all compared. Says "not measured" and why where that is impossible.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

STEPS = (7, 1, 1, 1, 1, 16, 1, 1)
"""Tokens of each step: chunks of a prompt, and single tokens in between that are captured and replayed."""

RELATIVE_ERROR = 2e-3
"""Largest accepted norm of the difference of float32 logits over their norm; TensorRT sums in another order."""


def check_engines() -> dict[str, Any]:
    """Run the check.

    Returns:
        {"measured": False, "reason": ...}, or the largest relative error of any step, whether steps ran from CUDA
        graphs, and `wrong`: the differences beyond the tolerance.
    """
    from engram_trt.plugins.tensorrt_api import BACKENDS, KNOWN_TARGETS
    from engram_trt.runtime.cuda_driver import local_compute_capability

    sm = local_compute_capability()
    if sm is None:
        return {"measured": False, "reason": "no usable CUDA driver"}
    usable = [name for name in BACKENDS if importlib.util.find_spec(name) and sm in KNOWN_TARGETS[name]]
    if not usable:
        return {"measured": False, "reason": f"no TensorRT for sm_{sm} can be imported"}
    with tempfile.TemporaryDirectory() as folder:
        return _compare(Path(folder), usable[0], sm)


def _compare(folder: Path, backend: str, sm: int) -> dict[str, Any]:
    from engram_trt.configs.preset_files import deployment_preset, model_preset
    from engram_trt.export.engines.build import BuildRequest, build_engines
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint
    from engram_trt.export.synth import SynthRequest, synthesize
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.stage_runners.tensorrt import TensorRTStageRunner

    checkpoint, root = folder / "checkpoint", folder / "artefact"
    synthesize(SynthRequest(config=model_preset("tiny"), out=checkpoint, seed=0))
    export_checkpoint(ExportRequest(checkpoint=checkpoint, out=root, deployment=deployment_preset("tiny")))
    build_engines(BuildRequest(artifact=root, backend=backend, targets=(sm,)))
    artifact = Artifact.open(root)
    with artifact.engine("torch") as reference, artifact.engine(backend) as engine:
        errors = [_relative_error(*pair) for pair in zip(_logits(engine), _logits(reference), strict=True)]
        reasons = [r.graphs.eager_reason for r in engine.runners if isinstance(r, TensorRTStageRunner)]
    wrong = [f"engines, step {step}: relative error {e:.1e}" for step, e in enumerate(errors) if e > RELATIVE_ERROR]
    return {
        "measured": True,
        "backend": backend,
        "relative_error": max(errors),
        "eager": sorted({reason for reason in reasons if reason}),
        "wrong": wrong,
    }


def _logits(engine: Any) -> list[Any]:
    from engram_trt.runtime.session import Session

    session, random = Session(engine), np.random.default_rng(0)
    row = session.add()
    vocab = engine.config.vocab_size
    return [session.step({row: random.integers(0, vocab, size=count)}, "all")[row] for count in STEPS]


def _relative_error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def say(result: dict[str, Any]) -> None:
    """Print a result."""
    if not result["measured"]:
        print(f"engines: not measured: {result['reason']}")
        return
    how = f"eagerly ({'; '.join(result['eager'])})" if result["eager"] else "from CUDA graphs"
    print(f"engines ({result['backend']}): relative error {result['relative_error']:.1e}, decode runs {how}")


if __name__ == "__main__":
    say(check_engines())
