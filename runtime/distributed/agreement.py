"""What all ranks must have in common before a stage is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engram_trt.configs.artifact import document_digest
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ClusterError
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.machine import machine_facts

Facts = dict[str, Any]
COMPARED = {
    "artefact": "the same artefact on every host",
    "deployment": "the same deployment file on every host",
    "back end": "the same --backend for every rank",
    "versions": "the same versions on every host",
}
"""Fact -> what the user has to provide."""


def facts_of(artifact: Artifact, deployment: DeploymentConfig, backend: str) -> Facts:
    """This rank's facts."""
    return {
        "artefact": artifact.manifest.digest,
        "deployment": document_digest(deployment.to_dict()),
        "back end": backend,
        "versions": dict(sorted(_versions().items())),
    }


def _versions() -> dict[str, str]:
    facts = machine_facts()
    versions = facts["versions"]
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def refusal(own: Mapping[str, Any], others: Mapping[int, str]) -> ClusterError | None:
    """The first difference between rank 0 and another; None if there is none.

    Args:
        own: rank 0's facts.
        others: rank -> its facts as JSON, or {"error": why it has none}.
    """
    for rank, text in sorted(others.items()):
        facts = json.loads(text)
        if "error" in facts:
            return _differs(rank, "start", facts["error"], "a rank that can start", "Correct this on its host.")
        for name, remedy in COMPARED.items():
            if facts[name] != own[name]:
                found, expected = _short(facts[name], own[name]), _short(own[name], facts[name])
                return _differs(rank, name, found, f"{expected}, as on rank 0", f"Provide {remedy}.")
    return None


def _short(value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        changed = {key: value.get(key) for key in sorted({*value, *other}) if value.get(key) != other.get(key)}
        return ", ".join(f"{key} {found or 'missing'}" for key, found in changed.items())
    text = str(value)
    return f"{text[:12]}..." if len(text) > 24 else text


def _differs(rank: int, name: str, found: str, expected: str, remedy: str) -> ClusterError:
    return ClusterError(f"rank {rank}: {name}", found=found, expected=expected, remedy=remedy)
