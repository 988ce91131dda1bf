"""`engram-trt inspect`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.configs.artifact import Manifest


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", type=Path, help="an exported artefact")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.artifact import Manifest

    manifest = Manifest.read(arguments.artifact)
    document = {
        "artifact": str(arguments.artifact),
        "digest": manifest.digest,
        "dtype": manifest.deployment.dtype,
        "limits": manifest.deployment.to_dict()["limits"],
        "has_weights": manifest.has_weights,
        "stages": [_stage(manifest, index) for index in range(len(manifest.stages))],
        "builds": builds(arguments.artifact, manifest),
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def _stage(manifest: Manifest, index: int) -> dict[str, Any]:
    record = manifest.stages[index]
    return {
        "stage": record.spec.name,
        "kind": record.spec.kind,
        "inputs": [_binding(tensor.to_json()) for tensor in record.spec.inputs],
        "outputs": [_binding(tensor.to_json()) for tensor in record.spec.outputs],
        "onnx_bytes": record.onnx.num_bytes,
        "weight_bytes": record.data.num_bytes,
    }


def _binding(tensor: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[name] for name in ("name", "dtype", "shape", "role", "alias")}


def builds(root: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """What there is of TensorRT under an artefact, and why a build cannot be used any more.

    Args:
        root: the artefact.
        manifest: its manifest.
    """
    from engram_trt.configs.errors import UserError
    from engram_trt.export.engines.targets import name_of
    from engram_trt.runtime.stage_runners.tensorrt_manifest import EnginesManifest, find_builds

    found: list[dict[str, Any]] = []
    for folder in find_builds(root):
        try:
            engines = EnginesManifest.read(folder)
        except UserError as error:
            found.append({"engines": str(folder), "stale": [str(error)]})
            continue
        users = {plan.key: [s.stage for s in engines.stages if s.plan == plan.key] for plan in engines.plans}
        found.append(
            {
                "engines": str(folder),
                "backend": f"{engines.backend} {engines.backend_version}",
                "targets": [name_of(sm) for sm in engines.targets],
                "bakes_weights": engines.bakes_weights,
                "kernels": len(engines.kernels),
                "stale": stale_reasons(engines, manifest, folder),
                "plans": [
                    {
                        "plan": plan.key,
                        "kind": plan.kind,
                        "stages": users[plan.key],
                        "bytes": plan.file.num_bytes,
                        "profiles": {name: dict(profile) for name, profile in plan.profiles.items()},
                        "plugin_layers": dict(plan.plugin_layers),
                        "build_ms": plan.facts.get("build_ms"),
                        "peak_bytes": plan.facts.get("peak_bytes"),
                    }
                    for plan in engines.plans
                ],
            }
        )
    return found


def stale_reasons(engines: Any, manifest: Manifest, folder: Path) -> list[str]:
    """Why a build no longer fits its artefact or this code; empty where it does.

    Args:
        engines: the build's `EnginesManifest`.
        manifest: of the artefact.
        folder: of the build.
    """
    from engram_trt.configs.errors import UserError
    from engram_trt.export.engines.plans import plan_code_digest
    from engram_trt.plugins.trt_registration import require_same_plugins

    reasons = []
    if engines.artifact_digest != manifest.digest:
        reasons.append("the artefact was exported again")
    if engines.code_digest != plan_code_digest():
        reasons.append("engram-trt changed since")
    try:
        require_same_plugins(str(folder), engines.plugins)
        for plan in engines.plans:
            plan.file.locate(folder)
    except UserError as error:
        reasons.append(str(error))
    return reasons


def _print(document: dict[str, Any]) -> None:
    print(f"{document['artifact']}: {len(document['stages'])} stages, {document['dtype']}, limits {document['limits']}")
    for stage in document["stages"]:
        sizes = f"{stage['weight_bytes'] / 2**20:,.1f} MiB of weights"
        print(f"\n{stage['stage']} ({stage['kind']}): {sizes}")
        for direction in ("inputs", "outputs"):
            for tensor in stage[direction]:
                alias = f", updates {tensor['alias']}" if tensor["alias"] else ""
                shape = ", ".join(str(extent) for extent in tensor["shape"])
                print(f"  {direction[:-1]:6} {tensor['name']}: {tensor['dtype']} [{shape}], {tensor['role']}{alias}")
    for build in document["builds"]:
        _print_build(build)
    if not document["builds"]:
        print("\nno TensorRT builds: `engram-trt build` makes one")


def _print_build(build: dict[str, Any]) -> None:
    print(f"\n{build['engines']}")
    for reason in build["stale"]:
        print(f"  stale: {reason}")
    if "plans" not in build:
        return
    weights = "baked" if build["bakes_weights"] else "bound"
    print(f"  {build['backend']}, {', '.join(build['targets'])}, weights {weights}, {build['kernels']} kernels")
    for plan in build["plans"]:
        layers = ", ".join(f"{count} {op}" for op, count in plan["plugin_layers"].items()) or "no plugins"
        profiles = "/".join(plan["profiles"])
        print(f"  {plan['kind']} [{', '.join(plan['stages'])}]: {plan['bytes'] / 2**20:.1f} MiB, {profiles}; {layers}")


COMMAND = Command(
    summary="show an artefact's stages and TensorRT builds",
    description=(
        "Show stages with their bindings, and TensorRT builds with their plans, profiles, plugin layers, sizes,\n"
        "targets, and what is stale."
    ),
    examples="""
    engram-trt inspect artefact
    engram-trt inspect artefact --json
    """,
    configure=_configure,
    run=_run,
)
