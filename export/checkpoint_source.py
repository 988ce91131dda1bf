"""A checkpoint in the released layout as a source of torch tensors, read through safetensors' memory maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Tensors as stored, mapped and not copied. Scales are checked for NaN when they are read."""

    checkpoint: Checkpoint
    _files: dict[Path, Any] = field(default_factory=dict, repr=False)
    _checked: set[str] = field(default_factory=set, repr=False)

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's model."""
        return self.checkpoint.config

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        try:
            self.checkpoint.entry(name)
        except CheckpointError:
            return False
        return True

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored.

        Raises:
            CheckpointError: absent, unreadable, or a scale that is NaN.
        """
        entry = self.checkpoint.entry(name)
        if name not in self._checked:
            self.checkpoint.check_scales(entry)
            self._checked.add(name)
        try:
            if entry.shard not in self._files:
                self._files[entry.shard] = safe_open(entry.shard, framework="pt")
            tensor: Tensor = self._files[entry.shard].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{entry.shard}: {name}",
                found=f"a tensor that cannot be read ({error})",
                expected="a readable shard",
                remedy="Check the disk, or fetch the shard again.",
            ) from None
        return tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor
