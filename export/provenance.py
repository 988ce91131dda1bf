"""What a stage was made from: if none of it has changed, the stage need not be made again."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from engram_trt.configs.artifact import document_digest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.plugins.onnx_translation import OPSET

TOOLS = ("engram-trt", "torch", "onnx", "onnx-ir", "onnxscript")


def tool_versions() -> dict[str, str]:
    """Versions of what decides a graph, and the opset."""
    return {**{name: version(name) for name in TOOLS}, "opset": str(OPSET)}


@cache
def code_digest() -> str:
    """SHA-256 over the sources of `export` and `plugins`: a changed model is a changed stage."""
    digest = hashlib.sha256()
    export = Path(__file__).resolve().parent
    plugins = Path(str(__import__("engram_trt.plugins", fromlist=["__file__"]).__file__)).resolve().parent
    for root in (export, plugins):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def stage_inputs_digest(
    spec: StageSpec,
    deployment: DeploymentConfig,
    checkpoint: Checkpoint,
    token_map_digest: str | None,
    *,
    weights: bool,
) -> str:
    """Digest of everything that decides a stage's files. Limits are not among it: they bound buffers only."""
    return document_digest(
        {
            "spec": spec.to_json(),
            "numerics": [deployment.dtype, deployment.activation_quantization, deployment.cache_quantization],
            "model": checkpoint.config.digest(),
            "checkpoint": checkpoint.header_digest,
            "token_map": token_map_digest,
            "weights": weights,
            "tools": tool_versions(),
            "code": code_digest(),
        }
    )
