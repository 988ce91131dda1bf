"""`DeploymentConfig`: the operator's choices, read from a TOML file. Facts of the model have no place here."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import DeploymentError
from engram_trt.configs.json_file import read_bytes
from engram_trt.configs.layers import free_boundaries
from engram_trt.configs.limits import Limits
from engram_trt.configs.model import ModelConfig

_MAX_FILE_BYTES = 1 << 20
_LOWEST_LIMITS = {"max_batch": 1, "max_step_tokens": 1, "max_context": 1, "max_rollback": 0}
_HIGHEST_LIMIT = 2**31 - 1
_DEVICE = re.compile(r"cpu(:\d{1,4})?|cuda:\d{1,3}")
_EXPORTED = ("dtype", "activation_quantization", "cache_quantization", "limits", "dspark_taps")
"""Keys that shaped an artefact's graphs; the others may be chosen anew whenever it is opened, `experts` only if the
experts are stages of their own."""
_CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "activation_quantization": ("none", "reference"),
    "cache_quantization": ("none", "reference"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """A run of backbone layers on one device. Hash and embedding are with the first layer, the head with the last.

    Attributes:
        device: one of the deployment's devices.
        layers: first and last layer id, both included; empty, in the last place, for the head alone.
    """

    device: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """How a model is exported and run.

    Attributes:
        dtype: storage and compute between ops: `float32` or `bfloat16`.
        activation_quantization: `reference` rounds the inputs of FP8 and FP4 linears as the reference does.
        cache_quantization: `reference` rounds cached rows, index queries and index keys likewise.
        limits: what a session may ask for.
        devices: where stages run: `cpu`, `cpu:N` (a runner pinned to core N) or `cuda:N`; in order of the chain.
        stages: placement of the layers; empty spreads them over the devices by bytes and floor times.
        experts: those among the devices that share the routed experts of every layer, in the order of the experts'
            ids; empty leaves a layer's experts where the layer is. An export makes them stages of their own.
        dspark_taps: whether the input streams of the draft's target layers are an output.
        engram: where the Engram tables live; may be changed when an artefact is opened.

    Raises:
        DeploymentError: on construction, naming the key.
    """

    dtype: str = "float32"
    activation_quantization: str = "none"
    cache_quantization: str = "none"
    limits: Limits = field(default_factory=Limits)
    devices: tuple[str, ...] = ("cpu",)
    stages: tuple[StagePlacement, ...] = ()
    experts: tuple[str, ...] = ()
    dspark_taps: bool = False
    engram: EngramPlacement = field(default_factory=EngramPlacement)

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                _bad(key, repr(getattr(self, key)), " or ".join(choices))
        for key, lowest in _LOWEST_LIMITS.items():
            value = getattr(self.limits, key)
            if not lowest <= value <= _HIGHEST_LIMIT:
                _bad(f"limits.{key}", str(value), f"{lowest}..{_HIGHEST_LIMIT}")
        if self.limits.max_step_tokens > self.limits.max_context:
            expected = f"at most max_context {self.limits.max_context}"
            _bad("limits.max_step_tokens", str(self.limits.max_step_tokens), expected)
        if not self.devices or len(set(self.devices)) != len(self.devices):
            _bad("devices", str(list(self.devices)), "at least one device, each named once")
        for position, device in enumerate(self.devices):
            if not _DEVICE.fullmatch(device):
                _bad(f"devices[{position}]", repr(device), "a device: cpu, cpu:N (pinned to core N) or cuda:N")
        strangers = [device for device in self.experts if device not in self.devices]
        if strangers or len(set(self.experts)) != len(self.experts):
            _bad("experts", str(list(self.experts)), f"devices out of {list(self.devices)}, each named once")
        self._check_stages()

    def _check_stages(self) -> None:
        next_layer, order = 0, list[str]()
        for position, stage in enumerate(self.stages):
            key = f"stages[{position}]"
            if stage.device not in self.devices:
                _bad(f"{key}.device", repr(stage.device), f"one of {list(self.devices)}")
            order += [stage.device] if order[-1:] != [stage.device] else []
            if not stage.layers:
                if position == 0 or position != len(self.stages) - 1:
                    _bad(f"{key}.layers", "[]", "[first, last]; only the last entry may hold the head alone")
                continue
            first, last = stage.layers
            if first != next_layer or last < first:
                found = f"[{first}, {last}]" + _twice_or_never(first, next_layer)
                _bad(f"{key}.layers", found, f"[{next_layer}, last], following the one before")
            next_layer = last + 1
        if self.stages and order != list(self.devices):
            _bad("stages", f"devices in the order {order}", f"one range of layers for each of {list(self.devices)}")

    @property
    def spreads_experts(self) -> bool:
        """Whether the experts of some layer are on other devices than the layer."""
        return bool(self.experts) and len(self.devices) > 1

    @classmethod
    def from_file(cls, path: Path | str) -> DeploymentConfig:
        """Read a TOML file; every key is optional.

        Raises:
            DeploymentError: naming file and key, for a file that is no TOML, an unknown key or a bad value.
        """
        text = read_bytes(Path(path), DeploymentError, max_bytes=_MAX_FILE_BYTES)
        try:
            document = tomllib.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as cause:
            raise DeploymentError(
                str(path), found=f"no valid TOML ({cause})", expected="TOML", remedy="Correct the file."
            ) from None
        return cls.from_dict(document, where=str(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], where: str = "deployment") -> DeploymentConfig:
        """Read a parsed file; see `from_file`."""
        try:
            values = _typed_values(document, cls)
            if "limits" in values:
                values["limits"] = Limits(**_typed_values(values["limits"], Limits, "limits."))
            if "engram" in values:
                values["engram"] = EngramPlacement.from_dict(
                    _typed_values(values["engram"], EngramPlacement, "engram.")
                )
            if "stages" in values:
                values["stages"] = tuple(_stage(entry, n) for n, entry in enumerate(values["stages"]))
            return cls(**values)
        except DeploymentError as error:
            raise DeploymentError(
                f"{where}: {error.where}",
                found=error.found,
                expected=error.expected,
                remedy=error.remedy,
            ) from None

    @classmethod
    def for_artifact(cls, path: Path | str, exported: DeploymentConfig) -> DeploymentConfig:
        """Read a file that says where an exported artefact runs.

        Args:
            path: devices, stages and Engram residency of this machine; what the export has fixed may be repeated.
            exported: the deployment of the artefact; gives every key that the file leaves out.

        Raises:
            DeploymentError: as `from_file`, or the file asks for other graphs than the artefact has.
        """
        chosen, given = cls.from_file(path), tomllib.loads(Path(path).read_text("utf-8"))
        for key in _EXPORTED:
            same = getattr(chosen, key) == getattr(exported, key)
            if key == "limits":
                limits = exported.to_dict()["limits"]
                same = all(limits[name] == value for name, value in given.get(key, {}).items())
            if key in given and not same:
                raise DeploymentError(
                    f"{path}: {key}",
                    found=str(given[key]),
                    expected=f"{exported.to_dict()[key]}, as the artefact was exported",
                    remedy="Remove the key, or export again with this file.",
                )
        if chosen.experts and not exported.experts:
            raise DeploymentError(
                f"{path}: experts",
                found=str(list(chosen.experts)),
                expected="no such key: in this artefact the experts of a layer are inside its stage",
                remedy="Remove the key, or export again with this file.",
            )
        return cls.from_dict({**exported.to_dict(), **_placing(given)}, where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, which `from_dict` reads back."""
        return {
            "dtype": self.dtype,
            "activation_quantization": self.activation_quantization,
            "cache_quantization": self.cache_quantization,
            "limits": {key: getattr(self.limits, key) for key in _LOWEST_LIMITS},
            "devices": list(self.devices),
            "stages": [{"device": stage.device, "layers": list(stage.layers)} for stage in self.stages],
            "experts": list(self.experts),
            "dspark_taps": self.dspark_taps,
            "engram": self.engram.to_dict(),
        }

    def with_dtype(self, dtype: str) -> DeploymentConfig:
        """The same deployment in another dtype; `DeploymentError` for one that does not exist."""
        return replace(self, dtype=dtype)

    def require_fits(self, config: ModelConfig) -> None:
        """Hold the choices against a model.

        Raises:
            DeploymentError: when taps are asked of a model without draft stages, the context is longer than the
                model's, or stages do not cover the layers or are cut where whole caches would travel.
        """
        strangers = sorted({layer_id for layer_id, _ in self.engram.layers} - set(config.engram_layer_ids))
        if strangers:
            _bad("engram.layers", str(strangers), f"Engram layers of the model, {list(config.engram_layer_ids)}")
        if self.dspark_taps and not config.has_dspark:
            _bad("dspark_taps", "true", "false: the model has no draft stages")
        longest = config.max_position_embeddings
        if longest is not None and self.limits.max_context > longest:
            _bad("limits.max_context", str(self.limits.max_context), f"at most {longest}, the model's own")
        if len(self.experts) > config.n_routed_experts:
            _bad("experts", f"{len(self.experts)} devices", f"at most {config.n_routed_experts}, one for each expert")
        self._require_stages_fit(config)

    def _require_stages_fit(self, config: ModelConfig) -> None:
        if not self.stages:
            return
        position = max(n for n, stage in enumerate(self.stages) if stage.layers)
        if self.stages[position].layers[1] != config.n_layers - 1:
            found = f"{self.stages[position].layers[1]} as the last layer"
            remedy = "Place every layer once; is it a deployment of another model?"
            _bad(f"stages[{position}].layers", found, str(config.n_layers - 1), remedy)
        cheap = free_boundaries(config)
        for position in range(1, len(self.stages)):
            before, stage = self.stages[position - 1], self.stages[position]
            if stage.device != before.device and stage.layers and stage.layers[0] not in cheap:
                cut = stage.layers[0]
                nearest = min(cheap[:-1], key=lambda layer_id: (abs(layer_id - cut), layer_id), default=None)
                allowed = ", ".join(str(layer_id) for layer_id in cheap[:-1]) or "none"
                _bad(
                    f"stages[{position}].layers",
                    f"a change of device before layer {cut}, inside a group that shares one compressed cache",
                    f"one before a kv source: {allowed}",
                    "Put all on one device." if nearest is None else f"The nearest is before layer {nearest}.",
                )


def _placing(document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file that say where an artefact runs; other devices void the exported placement."""
    placing = {key: value for key, value in document.items() if key not in _EXPORTED}
    return {"stages": [], "experts": [], **placing} if "devices" in placing else placing


def _twice_or_never(first: int, expected: int) -> str:
    if first < expected:
        return f": layer {first} is placed twice"
    return f": layer {expected} is placed nowhere" if first > expected else ""


def _bad(key: str, found: str, expected: str, remedy: str = "Correct the deployment.") -> NoReturn:
    raise DeploymentError(key, found=found, expected=expected, remedy=remedy)


def _typed_values(document: Mapping[str, Any], target: type[Any], prefix: str = "") -> dict[str, Any]:
    """Check names and TOML types against the fields of `target`; lists become tuples."""
    known = {item.name: item for item in fields(target)}
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f"Did you mean {prefix}{close[0]}?" if close else "Remove it."
            _bad(f"{prefix}{key}", "an unknown key", ", ".join(known), remedy)
        item = known[key]
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        values[key] = _typed(f"{prefix}{key}", value, default)
    return values


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, Limits | EngramPlacement) or key == "engram.layers":
        return value if isinstance(value, dict) else _bad(key, repr(value), "a table")
    if isinstance(default, tuple):
        inner = dict if key == "stages" else str
        if not isinstance(value, list | tuple) or not all(isinstance(entry, inner) for entry in value):
            _bad(key, repr(value), "a list of " + ("strings" if inner is str else "tables"))
        return tuple(value)
    if type(value) is not type(default):
        _bad(key, repr(value), f"a value like {default!r}")
    return value


def _stage(entry: Mapping[str, Any], position: int) -> StagePlacement:
    key = f"stages[{position}]"
    if set(entry) != {"device", "layers"}:
        _bad(key, f"the keys {sorted(entry)}", "device and layers")
    device, layers = entry["device"], entry["layers"]
    if not isinstance(device, str):
        _bad(f"{key}.device", repr(device), "a string")
    if not isinstance(layers, list) or [type(layer_id) for layer_id in layers] not in ([], [int, int]):
        _bad(f"{key}.layers", repr(layers), "[first, last], or [] for the head alone")
    return StagePlacement(device=device, layers=tuple(layers))
