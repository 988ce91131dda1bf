"""What a stage was made from: if none of it has changed, the stage need not be made again."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from engram_trt.configs.artifact import document_digest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.sources import sources_digest
from engram_trt.plugins.onnx_exporter import OPSET

TOOLS = ("engram-trt", "torch", "onnx", "onnx-ir", "onnxscript")


def tool_versions() -> dict[str, str]:
    """Versions of what decides a graph, and the opset."""
    return {**{name: version(name) for name in TOOLS}, "opset": str(OPSET)}


GRAPH_SOURCES = (
    "export/modeling/*.py",
    "export/stages/*.py",
    "export/passes/cleanup.py",
    "export/passes/functions.py",
    "export/tracing.py",
    "plugins/*/spec.py",
    "plugins/*/reference.py",
    "plugins/*/torch_op.py",
    "plugins/*/onnx_op.py",
    "plugins/onnx_*.py",
    "plugins/float_tables.py",
    "plugins/primitives.py",
    "plugins/spec.py",
)
"""Sources that decide what a traced graph looks like."""

WEIGHT_SOURCES = ("export/onnx_export.py", "export/passes/weights.py", "export/passes/data_layout.py")
"""Sources that, besides, decide what a stage's data file looks like."""


def graph_key(spec: StageSpec, config: ModelConfig, compute: ComputeConfig, pad_id: int | None) -> str:
    """Digest of everything a kind's graph depends on: no weight, no layer id, no limit."""
    bindings = [[item.name, item.dtype, list(item.shape)] for item in (*spec.inputs, *spec.outputs)]
    return document_digest(
        {
            "kind": spec.kind,
            "bindings": bindings,
            "model": config.digest(),
            "compute": [str(compute.dtype), compute.activation_quantization, compute.cache_quantization],
            "pad_id": pad_id,
            "tools": tool_versions(),
            "code": sources_digest(GRAPH_SOURCES),
        }
    )


def shards_digest(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """Says from which shards, in which state, some tensors are read: header, size and time of the last change.

    The weights themselves are not read: whoever writes to a shard changes its time.
    """
    headers = {header.path.name: header for header in map(checkpoint.header, names)}
    states = [
        [name, header.digest, header.file_bytes, header.identity.mtime_ns if header.identity else 0]
        for name, header in sorted(headers.items())
    ]
    return document_digest({"shards": states})


def stage_inputs_digest(
    spec: StageSpec,
    deployment: DeploymentConfig,
    checkpoint: Checkpoint,
    token_map_digest: str | None,
    stored_names: Iterable[str],
    *,
    weights: bool,
) -> str:
    """Digest of everything that decides a stage's files. Limits are not among it: they bound buffers only.

    Args:
        spec: the stage.
        deployment: numerics.
        checkpoint: the model and the shards.
        token_map_digest: of the compressed token map, where there is one.
        stored_names: tensors of the checkpoint that the stage's data file is made from.
        weights: False for a data file of zeros.
    """
    return document_digest(
        {
            "spec": spec.to_json(),
            "numerics": [deployment.dtype, deployment.activation_quantization, deployment.cache_quantization],
            "model": checkpoint.config.digest(),
            "shards": shards_digest(checkpoint, stored_names) if weights else None,
            "token_map": token_map_digest,
            "weights": weights,
            "tools": tool_versions(),
            "code": sources_digest(GRAPH_SOURCES + WEIGHT_SOURCES),
        }
    )
