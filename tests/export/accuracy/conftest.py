"""Golden folders to damage: copies of small parts of the vectors in the repository."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The vectors in the repository; not to be changed."""
    return GOLDEN


@pytest.fixture
def part_of_golden(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder that holds only the named files of the vectors in the repository."""

    def make(*files: str) -> Path:
        for file in files:
            target = tmp_path / "golden" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(GOLDEN / file, target)
        return tmp_path / "golden"

    return make


@pytest.fixture
def change() -> Callable[[Path, str, float], None]:
    """Add a number to the first entry of a tensor in a file."""

    def add(path: Path, name: str, amount: float) -> None:
        tensors = load_file(path)
        flat = tensors[name].reshape(-1)
        flat[0] = (flat[0].to(torch.float64) + amount).to(flat.dtype)
        save_file(tensors, path)

    return add
