"""From a checkpoint to an artefact: stages, then the manifest. Killed at any point, it resumes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engram_trt.configs.artifact import MANIFEST_NAME, FileRecord, Manifest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ArtifactError, RequestError
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.graph_pool import trace_kinds
from engram_trt.export.graph_store import GraphStore, default_folder
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.weights import resident_tensor_names
from engram_trt.export.onnx_export import StageExporter
from engram_trt.export.provenance import stage_inputs_digest, tool_versions
from engram_trt.export.residents import resident_records
from engram_trt.export.stage_records import StageStore
from engram_trt.export.stages.chain import stage_specs
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

STAGES_FOLDER = "stages"
COPIED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export.

    Args:
        checkpoint: folder in the released layout.
        out: folder to publish the artefact at.
        deployment: numerics and limits.
        stages: names of stages; None for all that the checkpoint holds.
        weights: False writes data files of zeros and reads no weight.
    """

    checkpoint: Path
    out: Path
    deployment: DeploymentConfig
    stages: tuple[str, ...] | None = None
    weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Callbacks of a long export.

    Args:
        plan: total weight bytes and number of stages, once.
        traced: a kind of stage has its graph.
        written: weight bytes just written or digested.
        stage: a stage is complete; True if it was there already.
    """

    plan: Callable[[int, int], None] = lambda num_bytes, num_stages: None
    traced: Callable[[str], None] = lambda kind: None
    written: Callable[[int], None] = lambda num_bytes: None
    stage: Callable[[str, bool], None] = lambda name, reused: None


def export_checkpoint(
    request: ExportRequest, progress: Progress | None = None, graphs: GraphStore | None = None
) -> Manifest:
    """Export a checkpoint; the artefact appears at `request.out` complete or not at all.

    Stages are written to a work folder beside `out` and recorded one by one, so that a second run continues
    where a killed one stopped, and takes over what has not changed from an older artefact.

    Args:
        request: what to export.
        progress: callbacks.
        graphs: where traced graphs are kept; the user's cache folder by default.

    Raises:
        UserError: the checkpoint, the deployment or the disk does not allow it. What was there stays.
    """
    progress = progress or Progress()
    checkpoint = Checkpoint.open(request.checkpoint)
    config, deployment = checkpoint.config, request.deployment
    deployment.require_fits(config)
    token_map = _token_map(checkpoint)
    ids = None if token_map is None else torch.from_numpy(token_map.ids.copy())
    compute = ComputeConfig.from_deployment(deployment)
    exporter = StageExporter(
        CheckpointSource(checkpoint=checkpoint), compute, ids, graphs or GraphStore(default_folder())
    )
    specs = _chosen(request, checkpoint, compute)
    digests = {
        spec.name: stage_inputs_digest(
            spec, deployment, checkpoint, token_map.digest if token_map else None, weights=request.weights
        )
        for spec in specs
    }
    with _work_folder(request.out) as work:
        store = StageStore(work / STAGES_FOLDER, work, request.out)
        missing = [spec for spec in specs if store.find(spec.name, digests[spec.name]) is None]
        _require_space(work, exporter, missing, zeros=not request.weights)
        residents = [spec for spec in specs if any(tensor.role == "resident" for tensor in spec.inputs)]
        progress.plan(_bytes_to_do(exporter, missing, residents, checkpoint, weights=request.weights), len(specs))
        trace_kinds(exporter, missing, progress.traced)
        records = []
        for spec in specs:
            record = store.find(spec.name, digests[spec.name])
            reused = record is not None
            if record is None:
                files = exporter.export(
                    spec, work / STAGES_FOLDER, zeros=not request.weights, progress=progress.written
                )
                record = store.add(spec, digests[spec.name], *files)
            records.append(record)
            progress.stage(spec.name, reused)
        manifest = Manifest(
            model_digest=config.digest(),
            deployment=deployment,
            has_weights=request.weights,
            checkpoint_path=str(checkpoint.root),
            checkpoint_digest=checkpoint.header_digest,
            token_map_sha256=token_map.digest if token_map else None,
            tools=tool_versions(),
            stages=tuple(records),
            residents=resident_records(
                checkpoint, residents, progress.written, digests=request.weights, known=store.known_residents
            ),
            files=_copy_files(checkpoint, work),
        )
        store.publish(manifest)
    return manifest


def _chosen(request: ExportRequest, checkpoint: Checkpoint, compute: ComputeConfig) -> tuple[StageSpec, ...]:
    config = checkpoint.config
    specs = stage_specs(
        config,
        compute,
        packed_experts=True,
        dspark_taps=request.deployment.dspark_taps,
        layers=checkpoint.partial_layers,
    )
    if request.stages is None:
        return specs
    names = [spec.name for spec in specs]
    unknown = sorted(set(request.stages) - set(names))
    if unknown:
        raise RequestError(
            "--stages",
            found=", ".join(unknown),
            expected=f"names out of {', '.join(names)}",
            remedy="Name stages that this checkpoint holds.",
        )
    return tuple(spec for spec in specs if spec.name in request.stages)


def _token_map(checkpoint: Checkpoint) -> TokenMap | None:
    if not checkpoint.config.has_engram or checkpoint.partial_layers is not None:
        return None
    return TokenMap.for_model(Tokenizer.open(checkpoint.tokenizer_path, checkpoint.config), checkpoint.config)


def _bytes_to_do(
    exporter: StageExporter,
    missing: Sequence[StageSpec],
    residents: Sequence[StageSpec],
    checkpoint: Checkpoint,
    *,
    weights: bool,
) -> int:
    dense = sum(weight.num_bytes for spec in missing for weight in exporter.weights(spec).values())
    if not weights:
        return dense
    return dense + sum(
        checkpoint.entry(name).nbytes
        for spec in residents
        for tensor in spec.inputs
        if tensor.role == "resident"
        for name in resident_tensor_names(checkpoint.config, tensor)
    )


def _require_space(work: Path, exporter: StageExporter, missing: Sequence[StageSpec], *, zeros: bool) -> None:
    """Refuse before the first byte if the data files cannot fit."""
    needed = sum(weight.num_bytes for spec in missing for weight in exporter.weights(spec).values())
    free = shutil.disk_usage(work).free
    if needed > free and not zeros:
        raise ArtifactError(
            str(work.parent),
            found=f"{free:,} bytes free",
            expected=f"{needed:,} for the stages' weights",
            remedy="Free some room or choose another --out.",
        )


def _copy_files(checkpoint: Checkpoint, work: Path) -> tuple[FileRecord, ...]:
    records = []
    for name in COPIED_FILES:
        source = checkpoint.root / name
        if source.is_file():
            shutil.copyfile(source, work / name)
            records.append(FileRecord.of(work, work / name))
    return tuple(records)


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """The folder beside `out` in which its successor grows; one export at a time may use it.

    Raises:
        ArtifactError: another export is at work there, `out` is something else, or the disk refuses.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).is_file())):
        raise ArtifactError(
            str(out),
            found="a file or folder that is no artefact",
            expected="an absent or empty folder, or an artefact to replace",
            remedy="Choose another --out.",
        )
    work = out.with_name(f".{out.name}.export")
    try:
        (work / STAGES_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = os.open(work.with_name(f"{work.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise _disk_error(work, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ArtifactError(
            str(work), found="another export at work", expected="one at a time", remedy="Wait for it to end."
        ) from None
    try:
        yield work
    except OSError as error:
        raise _disk_error(work, error) from error
    finally:
        os.close(lock)
    work.with_name(f"{work.name}.lock").unlink(missing_ok=True)


def _disk_error(work: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        str(work),
        found=f"{error.strerror or error}",
        expected="a writable disk with room",
        remedy="What was finished is kept: make room and run the same command again.",
    )
