"""A command in several processes: meet, agree, load, run; rank 0 does the command's work, the others serve it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import DeploymentError, PeerError, UserError
from engram_trt.configs.limits import symbol_limits
from engram_trt.runtime.artifact import Artifact, open_backend
from engram_trt.runtime.bench_pipeline import Recorder
from engram_trt.runtime.device_threads import core_of, require_core
from engram_trt.runtime.distributed.agreement import facts_of, refusal
from engram_trt.runtime.distributed.chain import Ring, RingChain
from engram_trt.runtime.distributed.cluster import Cluster
from engram_trt.runtime.distributed.mail import Transport
from engram_trt.runtime.distributed.rank_experts import RankExperts
from engram_trt.runtime.distributed.ranks import Rank
from engram_trt.runtime.distributed.routes import Routes
from engram_trt.runtime.distributed.watch import LIMIT_SECONDS
from engram_trt.runtime.distributed.worker import Worker
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.placement import PlacedStages
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend
from engram_trt.runtime.timeline import Span, Timeline
from engram_trt.runtime.verification import HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What every rank opens.

    Args:
        command: for messages, such as `engram-trt generate`.
        artifact: folder of the artefact.
        checkpoint: where the checkpoint is now, if not where it was.
        backend: name of the back end.
        deployment: file that says where stages run; None spreads them over the ranks.
        verify: how much is digested first (see `verification.LEVELS`).
    """

    command: str
    artifact: Path
    checkpoint: Path | None
    backend: str
    deployment: Path | None
    verify: str = HEADERS


Body = Callable[[Artifact, Engine, Recorder], int]


class RingRecorder(Recorder):
    """Records in all ranks."""

    def __init__(self, ring: Ring, cluster: Cluster, timeline: Timeline) -> None:
        self.num_ranks = cluster.rank.world_size
        self._ring, self._cluster, self._timeline = ring, cluster, timeline
        self._num_recordings = 0

    def start_recording(self) -> None:
        self._ring.record(is_on=True)
        self._timeline.spans.clear()
        self._timeline.is_on = True

    def stop_recording(self) -> list[Span]:
        self._timeline.is_on = False
        self._ring.record(is_on=False)
        key = f"spans{self._num_recordings}"
        self._num_recordings += 1
        spans = list(self._timeline.spans)
        for number in range(1, self._cluster.rank.world_size):
            spans += Timeline.spans_of(self._cluster.note(f"{key}/{number}"), number)
        return spans


def run_ranked(rank: Rank, request: LaunchRequest, body: Body) -> int:
    """Run a command as one of several ranks.

    Args:
        rank: which.
        request: what every rank opens.
        body: rank 0's work.

    Returns:
        the exit code.

    Raises:
        UserError: on rank 0, whatever rank it concerns; on another only if it cannot join.
        PeerError: a rank is lost.
    """
    cluster = Cluster(rank, request.command)  # who cannot join has to say so itself
    try:
        with cluster:
            return _run_joined(cluster, request, body)
    except PeerError as error:
        if rank.number and error.kind not in ("lost", "failed"):
            return error.exit_code  # rank 0 has told the user
        raise
    except UserError:
        if rank.number:
            return 2
        raise


def _run_joined(cluster: Cluster, request: LaunchRequest, body: Body) -> int:
    artifact, deployment, placed, pins = _agree(cluster, request)
    rank = cluster.rank
    engine, experts = _load(rank, artifact, deployment, placed, request.backend, pins=pins)
    with engine:
        transport, routes = cluster.transport(engine.backend), Routes(placed)
        if experts is not None:
            experts.connect(cluster.lane, _suspecting(cluster))
        cluster.post(f"ready/{rank.number}", "")
        cluster.notes("ready")
        cluster.watch.limit_seconds = LIMIT_SECONDS
        if rank.number:
            _serve(cluster, engine, routes, transport)
            if experts is not None:
                experts.end()
            return 0
        ring = Ring(routes, tuple(sorted(engine.symbol_limits)), transport, _suspecting(cluster))
        cluster.watch.on_failure(ring.fail)
        whole = replace(engine, open_chain=lambda own, sizes: RingChain(own, sizes, ring))
        code = body(artifact, whole, RingRecorder(ring, cluster, engine.timeline))
        ring.end()
        if experts is not None:
            experts.end()
        return code


def _serve(cluster: Cluster, engine: Engine, routes: Routes, transport: Transport) -> None:
    number, recordings = cluster.rank.number, count()

    def publish(text: str) -> None:
        cluster.post(f"spans{next(recordings)}/{number}", text)

    worker = Worker(engine, routes, number, transport, _suspecting(cluster), publish)
    cluster.watch.on_failure(worker.stop)
    worker.serve()


def _suspecting(cluster: Cluster) -> Callable[[Exception], None]:
    """What a broken connection, or a message that is none, leads to."""

    def failed(error: Exception) -> None:
        if isinstance(error, UserError):
            cluster.watch.tell("failed", str(error))
        else:
            cluster.watch.suspect(error)

    return failed


def _agree(
    cluster: Cluster, request: LaunchRequest
) -> tuple[Artifact, DeploymentConfig, tuple[PlacedStages, ...], bool]:
    """Open everything, compare with the other ranks; the last value says whether devices were named."""
    rank = cluster.rank
    try:
        artifact = Artifact.open(request.artifact, request.checkpoint, request.verify)
        deployment, pins = deployment_for(rank.world_size, artifact.manifest.deployment, request)
        placed = artifact.place(deployment)
        facts = facts_of(artifact, deployment, request.backend)
    except UserError as error:
        if rank.number:
            cluster.post(f"facts/{rank.number}", json.dumps({"error": str(error)}))
            cluster.note("agreed")
        raise
    cluster.post(f"facts/{rank.number}", json.dumps(facts))
    if rank.number == 0:
        difference = refusal(facts, cluster.notes("facts"))
        if difference is not None:
            raise difference
        cluster.post("agreed", "")
    cluster.note("agreed")
    return artifact, deployment, placed, pins


def deployment_for(
    world_size: int, exported: DeploymentConfig, request: LaunchRequest
) -> tuple[DeploymentConfig, bool]:
    """The deployment of a launch, one device per rank, and whether the devices were named by someone.

    Raises:
        DeploymentError: a file that cannot be used, or another number of devices than of ranks.
    """
    if request.deployment is not None:
        chosen = DeploymentConfig.for_artifact(request.deployment, exported)
        if len(chosen.devices) != world_size:
            raise DeploymentError(
                f"{request.deployment}: devices",
                found=f"{len(chosen.devices)} devices",
                expected=f"{world_size}, one for each process",
                remedy=f"Start {len(chosen.devices)} processes, or name {world_size} devices.",
            )
        return chosen, True
    if len(exported.devices) == world_size:
        return exported, True
    kind = "cuda" if request.backend.startswith("tensorrt") else "cpu"
    devices = tuple(f"{kind}:{number}" for number in range(world_size))
    return replace(exported, devices=devices, stages=(), experts=devices if exported.experts else ()), False


def _load(
    rank: Rank,
    artifact: Artifact,
    deployment: DeploymentConfig,
    placed: tuple[PlacedStages, ...],
    backend: str,
    *,
    pins: bool,
) -> tuple[Engine, RankExperts | None]:
    """This rank's stages and experts. Over several hosts, a device is numbered on its own host."""
    own = placed[rank.number]
    device = own.device if rank.is_one_host else f"{own.device.partition(':')[0]}:{rank.local_number}"
    is_core = core_of(device) is not None
    if pins and is_core:
        # This thread runs the stages, and those it starts from now on inherit its core.
        os.sched_setaffinity(0, {require_core(device)})
    shared = artifact.with_share(own.device, deployment) if deployment.spreads_experts else artifact
    opened = open_backend(backend, shared, None if is_core and not pins else device)
    if isinstance(opened, OnnxRuntimeBackend) and not pins:
        opened.num_threads = max(1, len(os.sched_getaffinity(0)) // rank.local_world_size)
    layers = {stage.layer_id for stage in own.stages if stage.layer_id is not None}
    store = artifact.engram_store(opened, deployment.engram, layers)
    here = replace(own, device="cpu" if is_core else device)
    experts = None
    if deployment.spreads_experts:
        limits, all_placed = symbol_limits(artifact.config, deployment.limits), list(placed)
        all_placed[rank.number] = here
        experts = RankExperts(deployment, all_placed, artifact.config.n_routed_experts, limits, rank.number, opened)
    groups = None if experts is None else {here.device: experts.group}
    return Engine.load_placed(artifact.config, deployment, (here,), {here.device: opened}, store, groups), experts
