"""Golden folders as weight sources: float weights in one file, an overlay for the quantised modes, no index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.model import ModelConfig


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file; CheckpointError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(path),
            found=f"a file that cannot be read ({error})",
            expected="a safetensors file",
            remedy="Copy the folder again and compare it with its SHA256SUMS.",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSource:
    """A golden model's weights in one numeric mode.

    Args:
        config: the model.
        tensors: upstream names.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, folder: Path, mode: str) -> GoldenSource:
        """Read a `model/<name>` folder for a mode such as `f32` or `bf16_q`."""
        tensors = read_tensors(folder / "weights.safetensors")
        overlay = folder / "weights_q_overlay.safetensors"
        if mode.endswith("_q") and overlay.is_file():
            tensors |= read_tensors(overlay)
        return cls(config=ModelConfig.from_file(folder / "config.json"), tensors=tensors)

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of this name."""
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; CheckpointError if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                name, found="no such tensor", expected="a weight of the model", remedy="Check the folder's files."
            ) from None


def token_map_of(inputs: dict[str, Tensor]) -> Tensor:
    """The token map a golden model was run with, [vocab_size] int64."""
    return inputs["token_map"].to(torch.int64)
