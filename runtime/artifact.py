"""Open an artefact: check it, find its checkpoint, load its stages with a back end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

from engram_trt.configs.artifact import Manifest
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import ArtifactError, BackendError, CheckpointError, TokenizerError
from engram_trt.configs.limits import symbol_limits
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import EXPERTS, StageSpec
from engram_trt.runtime.device_threads import core_of
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram.opening import bound_arrays, open_store
from engram_trt.runtime.engram.staging import ROWS, SCALES
from engram_trt.runtime.engram.store import EngramStore
from engram_trt.runtime.engram.tables import table_names
from engram_trt.runtime.experts.device_share import DeviceShare
from engram_trt.runtime.experts.parcels import expert_shares
from engram_trt.runtime.experts.spread import ExpertGroup, LocalGroup
from engram_trt.runtime.placement import PlacedStages, place, stage_cost
from engram_trt.runtime.resident_weights import ResidentWeights
from engram_trt.runtime.stage_runners.contract import Array, Backend
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer
from engram_trt.runtime.verification import HEADERS, verify_files, verify_residents

BACKEND_GROUP = "engram_trt.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A checked artefact and the checkpoint it refers to.

    Args:
        root: its folder.
        manifest: what it holds.
        config: its model.
        opened_checkpoint: holds Engram tables, and experts that were not copied; None where it is gone and every
            resident tensor has a copy.
        residents: the weights to bind.
        expert_share: the experts of every layer to bind, where another device has the others; None for all.
    """

    root: Path
    manifest: Manifest
    config: ModelConfig
    opened_checkpoint: Checkpoint | None
    residents: ResidentWeights
    expert_share: range | None = None

    @classmethod
    def open(cls, root: Path, checkpoint: Path | None = None, verify: str = HEADERS) -> Artifact:
        """Open and check an artefact.

        Args:
            root: its folder.
            checkpoint: where the checkpoint is now, if not where it was.
            verify: how much is digested first, one of `verification.LEVELS`.

        Raises:
            ArtifactError: it is none, is incomplete, or was changed.
            CheckpointError: the checkpoint is missing or another one.
        """
        manifest = Manifest.read(root)
        verify_files(root, manifest, verify)
        config = ModelConfig.from_file(root / "config.json")
        if config.digest() != manifest.model_digest:
            raise ArtifactError(
                str(root / "config.json"),
                found="a config of another model",
                expected="the one the stages were exported for",
                remedy="Export the checkpoint again.",
            )
        opened = _open_checkpoint(manifest, checkpoint)
        residents = ResidentWeights(root, manifest, opened)
        verify_residents(residents, manifest, verify)
        return cls(root=root, manifest=manifest, config=config, opened_checkpoint=opened, residents=residents)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; CheckpointError where it is gone and only copies are left."""
        if self.opened_checkpoint is None:
            raise _no_checkpoint(Path(self.manifest.checkpoint_path))
        return self.opened_checkpoint

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """Interfaces of all stages in the artefact."""
        return tuple(record.spec for record in self.manifest.stages)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.open(self.root, self.config)

    def resident(self, spec: StageSpec, binding: str) -> Array:
        """Weights of a resident input, int8: a table as it is mapped, experts stacked into one array."""
        share = self.expert_share if spec.kind == EXPERTS else None
        return self.residents.array(spec.input(binding).key, share)

    def engine(
        self,
        backend: str = "onnxruntime",
        engram: EngramPlacement | None = None,
        deployment: DeploymentConfig | None = None,
    ) -> Engine:
        """Load the whole chain, on the devices of its deployment.

        Args:
            backend: name of an installed back end.
            engram: where the Engram tables live, if not where the deployment says.
            deployment: where it runs, if not as it was exported (see `DeploymentConfig.for_artifact`).

        Raises:
            ArtifactError: some stages are missing.
            BackendError: there is no such back end, or it cannot run this artefact on these devices.
            CheckpointError, DeploymentError: a stage or an Engram table cannot be where it should.
            TokenizerError: the token map made here is not the one that the artefact was exported with.
        """
        chosen = deployment or self.manifest.deployment
        placed = self.place(chosen)
        one_anywhere = len(placed) == 1 and core_of(placed[0].device) is None
        is_spread = chosen.spreads_experts
        backends: dict[str, Backend] = {}
        shared: dict[str, Backend] = {}
        for range_ in placed:
            device = range_.device
            kind = "cpu" if core_of(device) is not None and not is_spread else device
            if kind not in shared:
                shared[kind] = open_backend(backend, self.with_share(device, chosen), None if one_anywhere else device)
            backends[device] = shared[kind]
        store = self.engram_store(backends[placed[0].device], engram or chosen.engram)
        groups = self._expert_groups(chosen, backends) if is_spread else {}
        return Engine.load_placed(self.config, chosen, placed, backends, store, groups)

    def with_share(self, device: str, deployment: DeploymentConfig) -> Artifact:
        """The artefact as one of the devices binds it that share its experts; itself for any other device."""
        if device not in deployment.experts:
            return self
        shares = expert_shares(self.config.n_routed_experts, len(deployment.experts))
        return replace(self, expert_share=shares[deployment.experts.index(device)])

    @property
    def expert_stages(self) -> tuple[StageSpec, ...]:
        """The layers' routed experts, where they are stages of their own."""
        return tuple(spec for spec in self.stages if spec.kind == EXPERTS)

    def _expert_groups(self, deployment: DeploymentConfig, backends: Mapping[str, Backend]) -> dict[str, ExpertGroup]:
        """For the layers of each device, the devices of this process that have their experts."""
        sizes, stages = symbol_limits(self.config, deployment.limits), self.expert_stages
        devices = [DeviceShare(device, backends[device], stages, sizes) for device in deployment.experts]
        shares = expert_shares(self.config.n_routed_experts, len(devices))
        return {device: LocalGroup(shares, devices, device) for device in backends}

    def place(self, deployment: DeploymentConfig) -> tuple[PlacedStages, ...]:
        """The whole chain on a deployment's devices; see `engine` for the errors."""
        names = [spec.name for spec in self.stages]
        if "embedding" not in names or "head" not in names or len(names) < self.config.n_layers + 2:
            raise ArtifactError(
                str(self.root),
                found=f"only the stages {', '.join(names)}",
                expected="the whole chain",
                remedy="Export without --stages, or run these stages in other tools.",
            )
        sizes = symbol_limits(self.config, deployment.limits)
        costs = {
            record.spec.name: stage_cost(record.spec, self.config, sizes, record.data.num_bytes)
            for record in self.manifest.stages
        }
        return place(self.stages, self.config, deployment, costs)

    def engram_store(
        self, backend: Backend, placement: EngramPlacement, layers: Collection[int] | None = None
    ) -> EngramStore | None:
        """Open the Engram tables; None for a model without.

        Args:
            backend: holds what is to be on its device.
            placement: where the tables live.
            layers: only the tables of these layers.
        """
        if not self.config.has_engram:
            return None
        self._require_token_map()
        digests = {record.key: record.sha256 for record in self.manifest.residents}
        known = {
            name: digests.get(f"layers.{layer_id}.{binding}")
            for layer_id in self.config.engram_layer_ids
            for name, binding in zip(table_names(layer_id), (ROWS, SCALES), strict=True)
        }
        binds_host = isinstance(backend, OnnxRuntimeBackend)
        store = open_store(
            self.checkpoint, placement, backend, binds_host=binds_host, digests=known, only_layers=layers
        )
        if isinstance(backend, OnnxRuntimeBackend):
            backend.resident_arrays = bound_arrays(store, backend.resident_arrays)
        return store

    def _require_token_map(self) -> None:
        """The hash stage has the map of the export: the tokenizer must still give that very map."""
        found = TokenMap.for_model(self.tokenizer(), self.config).digest
        if found != self.manifest.token_map_sha256:
            raise TokenizerError(
                str(self.root),
                found=f"a compressed token map with SHA-256 {found[:12]}...",
                expected=f"{str(self.manifest.token_map_sha256)[:12]}..., the map it was exported with",
                remedy="Use the tokenizer and the tokenizers version of the export, or export again.",
            )


def open_backend(name: str, artifact: Artifact, device: str | None = None) -> Backend:
    """A back end by name, out of the installed ones; BackendError for another.

    Args:
        name: of the back end.
        artifact: whose stages it will run.
        device: where; None for the back end's own choice.
    """
    found = {entry.name: entry for entry in entry_points(group=BACKEND_GROUP)}
    if name not in found:
        raise BackendError(
            "--backend", found=repr(name), expected=" or ".join(sorted(found)), remedy="Choose an installed back end."
        )
    try:
        factory: Callable[[Artifact, str | None], Backend] = found[name].load()
    except ImportError as error:
        raise BackendError(
            f"back end {name}",
            found=f"no package {error.name}",
            expected="the packages it needs",
            remedy=f"pip install 'engram-trt[{'export' if name == 'torch' else name}]'",
        ) from None
    return factory(artifact, device)


def onnxruntime_backend(artifact: Artifact, device: str | None = None) -> Backend:
    """The entry point of back end `onnxruntime`; a pinned device gets one thread."""
    require_cpu("onnxruntime", device)
    files = {record.spec.name: (artifact.root / record.onnx.path).resolve() for record in artifact.manifest.stages}
    pinned = device is not None and core_of(device) is not None
    return OnnxRuntimeBackend(files, artifact.resident, num_threads=1 if pinned else 0)


def require_cpu(backend: str, device: str | None) -> None:
    """BackendError where a back end of the CPU is to run elsewhere."""
    if device is not None and device.partition(":")[0] != "cpu":
        raise BackendError(
            f"back end {backend}",
            found=f"the device {device}",
            expected="cpu or cpu:N",
            remedy="Name CPU devices in the deployment, or choose another back end.",
        )


def _open_checkpoint(manifest: Manifest, path: Path | None) -> Checkpoint | None:
    place = Path(manifest.checkpoint_path) if path is None else path
    if path is None and not place.is_dir():
        if all(record.copy is not None for record in manifest.residents):
            return None
        raise _no_checkpoint(place)
    checkpoint = Checkpoint.open(place, layers=manifest.layers)
    if checkpoint.header_digest != manifest.checkpoint_digest:
        raise CheckpointError(
            str(place),
            found="another checkpoint",
            expected="the one this artefact was exported from",
            remedy="Say where that is with --checkpoint DIR, or export this one.",
        )
    return checkpoint


def _no_checkpoint(place: Path) -> CheckpointError:
    return CheckpointError(
        str(place),
        found="no checkpoint",
        expected="the one this artefact was exported from",
        remedy="Say where it is with --checkpoint DIR.",
    )
