"""A recorded GPU for the tests of the TensorRT back end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorrt_world import Listener, World, make_world


@pytest.fixture
def world(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tiny_artifact, tmp_path, monkeypatch)


@pytest.fixture
def tensorrt_log() -> Iterator[list[str]]:
    """What the back end warns of."""
    listener, logger = Listener(), logging.getLogger("engram_trt.tensorrt")
    logger.addHandler(listener)
    yield listener.messages
    logger.removeHandler(listener)
