"""What a plan is about: the built-in released model, or a checkpoint's config, index and shard headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.inventory import TensorShape, checkpoint_tensors, global_tensors, layer_tensors
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import PRESETS, model_preset
from engram_trt.export.planning.stage_bytes import num_parameters, stored_bytes
from engram_trt.export.synth_shards import shard_key, shard_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as it is stored.

    Attributes:
        name: preset or folder.
        config: the model.
        layers: of a partial checkpoint; None for a whole one.
        tensors: number of tensors.
        shards: file name -> bytes of its tensors.
        parameters: values of all tensors, scales not counted.
        root: folder of a checkpoint; None for a preset.
    """

    name: str
    config: ModelConfig
    layers: tuple[int, ...] | None
    tensors: int
    shards: Mapping[str, int]
    parameters: int
    root: Path | None

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.shards.values())

    def to_json(self) -> dict[str, object]:
        """Plain values; a partial checkpoint says so."""
        document: dict[str, object] = {
            "model": self.name,
            "checkpoint_bytes": self.num_bytes,
            "checkpoint_tensors": self.tensors,
            "checkpoint_shards": len(self.shards),
            "largest_shard_bytes": max(self.shards.values()),
            "parameters": self.parameters,
        }
        return document if self.layers is None else {**document, "partial_layers": list(self.layers)}


def model_facts(source: str) -> ModelFacts:
    """Facts of a preset name or a checkpoint folder; no weight is read.

    Raises:
        CheckpointError, ConfigError: the folder is no checkpoint that this project reads.
    """
    if source in PRESETS and not Path(source).exists():
        return _preset_facts(source)
    checkpoint = Checkpoint.open(Path(source))
    shards: dict[str, int] = {}
    for name in checkpoint.names():
        entry = checkpoint.entry(name)
        shards[entry.shard.name] = shards.get(entry.shard.name, 0) + entry.nbytes
    tensors = checkpoint_tensors(checkpoint.config, checkpoint.partial_layers)
    return ModelFacts(
        name=source,
        config=checkpoint.config,
        layers=checkpoint.partial_layers,
        tensors=len(tensors),
        shards=shards,
        parameters=sum(num_parameters(name, tensor) for name, tensor in tensors.items()),
        root=checkpoint.root,
    )


def _preset_facts(name: str) -> ModelFacts:
    """The same from shapes; one layer of each kind is looked at, because its likes hold the same."""
    config = model_preset(name)
    counts = _counts(global_tensors(config))
    known: dict[tuple[str, int | None], dict[int, _Count]] = {}
    for layer in config.layers:
        kind = layer.kind, layer.engram_index
        if kind not in known:
            found = _counts(layer_tensors(config, layer.layer_id))
            known[kind] = {key[0]: count for key, count in found.items()}
        counts |= {(part, layer.layer_id): count for part, count in known[kind].items()}
    ordered = [counts[key] for key in sorted(counts)]
    return ModelFacts(
        name=name,
        config=config,
        layers=None,
        tensors=sum(count.tensors for count in ordered),
        shards={shard_name(number, len(ordered)): c.num_bytes for number, c in enumerate(ordered, start=1)},
        parameters=sum(count.parameters for count in ordered),
        root=None,
    )


@dataclass(slots=True)
class _Count:
    """Sums over the tensors of a shard."""

    tensors: int = 0
    num_bytes: int = 0
    parameters: int = 0


def _counts(tensors: Mapping[str, TensorShape]) -> dict[tuple[int, int], _Count]:
    """By key of the shard that holds them."""
    counts: dict[tuple[int, int], _Count] = {}
    for name, tensor in tensors.items():
        count = counts.setdefault(shard_key(name), _Count())
        count.tensors += 1
        count.num_bytes += stored_bytes(tensor)
        count.parameters += num_parameters(name, tensor)
    return counts
