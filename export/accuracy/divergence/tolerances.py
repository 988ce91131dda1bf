"""`tolerances.json`: limits that a calibration measured, with how they were measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import ArtifactError
from engram_trt.configs.json_file import parse_json_object, read_bytes
from engram_trt.export.accuracy.divergence.limits import Limits
from engram_trt.export.accuracy.golden_folder import dump_json
from engram_trt.runtime.artifact import Artifact

FILE_NAME = "tolerances.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The noise of one tensor.

    Args:
        noise: largest error between two correct computations, relative to the root mean square.
        by: which pair of computations showed it.
        limit: what follows from it.
    """

    noise: float
    by: str
    limit: float


def artifact_digest(artifact: Artifact) -> str:
    """SHA-256 over an artefact's manifest: all its files, its checkpoint and its numerics."""
    return hashlib.sha256((artifact.root / "manifest.json").read_bytes()).hexdigest()


def rounds(artifact: Artifact) -> bool:
    """Whether the artefact rounds activations or caches."""
    deployment = artifact.manifest.deployment
    return "reference" in (deployment.activation_quantization, deployment.cache_quantization)


def read_limits(artifact: Artifact, path: Path | None) -> Limits:
    """Limits of an artefact: measured ones from the file, if there is one, and hand-set ones for the rest.

    Args:
        artifact: the artefact.
        path: a file of a calibration; None for the artefact's own, which need not exist.

    Raises:
        ArtifactError: the file is missing, damaged or of another artefact.
    """
    file = artifact.root / FILE_NAME if path is None else path
    if path is None and not file.exists():
        return Limits(rounding=rounds(artifact))
    document = parse_json_object(read_bytes(file, ArtifactError), str(file), ArtifactError)
    if document.get("artifact_sha256") != artifact_digest(artifact) or document.get("schema") != SCHEMA:
        raise ArtifactError(
            str(file),
            found="a calibration of another artefact or version",
            expected=f"one of {artifact.root}",
            remedy="Run `engram-trt compare ARTIFACT --calibrate` again.",
        )
    try:
        measured = {str(key): float(entry["limit"]) for key, entry in document["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            str(file), found=f"a damaged file ({error})", expected="a calibration", remedy="Calibrate again."
        ) from None
    return Limits(rounding=rounds(artifact), measured=measured)


def write_tolerances(artifact: Artifact, path: Path, tensors: Mapping[str, Measured], how: Mapping[str, Any]) -> None:
    """Write a calibration.

    Args:
        artifact: what was measured.
        path: the file.
        tensors: `stage.tensor` -> its noise.
        how: pairs of computations, prompts, factor, machine.
    """
    document = {
        "schema": SCHEMA,
        "artifact_sha256": artifact_digest(artifact),
        "how": dict(how),
        "tensors": {
            key: {"limit": item.limit, "noise": item.noise, "by": item.by} for key, item in sorted(tensors.items())
        },
    }
    dump_json(document, path)
