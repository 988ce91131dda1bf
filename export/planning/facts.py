"""What a plan is about: the built-in released model, or a checkpoint's config, index and shard headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
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
        tensors: of the checkpoint, by name.
        shards: file name -> bytes of its tensors.
        parameters: values of all tensors, scales not counted.
        root: folder of a checkpoint; None for a preset.
    """

    name: str
    config: ModelConfig
    layers: tuple[int, ...] | None
    tensors: Mapping[str, TensorShape]
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
            "checkpoint_tensors": len(self.tensors),
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
        config, layers, root = model_preset(source), None, None
        tensors = checkpoint_tensors(config)
        keys: dict[tuple[int, int], int] = {}
        for name, tensor in tensors.items():
            key = shard_key(name)
            keys[key] = keys.get(key, 0) + stored_bytes(tensor)
        shards = {shard_name(number, len(keys)): keys[key] for number, key in enumerate(sorted(keys), start=1)}
    else:
        checkpoint = Checkpoint.open(Path(source))
        config, layers, root = checkpoint.config, checkpoint.partial_layers, checkpoint.root
        tensors, shards = checkpoint_tensors(config, layers), {}
        for name in checkpoint.names():
            entry = checkpoint.entry(name)
            shards[entry.shard.name] = shards.get(entry.shard.name, 0) + entry.nbytes
    return ModelFacts(
        name=source,
        config=config,
        layers=layers,
        tensors=tensors,
        shards=shards,
        parameters=sum(num_parameters(name, tensor) for name, tensor in tensors.items()),
        root=root,
    )
