"""A small checkpoint in the released layout, written once; tests that damage it work on a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engram_trt.configs.model import ModelConfig
from engram_trt.export.synth import SynthRequest, synthesize

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def flat_config() -> Callable[[str], dict[str, Any]]:
    """Read one of the reference's flat configs by model name."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((DATA / "configs" / f"{name}.json").read_text())

    return read


@pytest.fixture(scope="session")
def pristine_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of the kinds window, pair source, candidate source with Engram; not to be changed."""
    config = ModelConfig.from_file(DATA / "configs" / "zero4.json")
    folder = tmp_path_factory.mktemp("checkpoint") / "zero4"
    synthesize(SynthRequest(config=config, out=folder, seed=3))
    return folder


@pytest.fixture
def checkpoint_folder(pristine_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine_checkpoint, tmp_path / "copy"))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a shard, by the format's definition and nothing of the project."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_shard(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a shard with any header."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def shards() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`read_shard` and `write_shard`."""
    return read_shard, write_shard
