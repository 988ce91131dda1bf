"""Recorded GPUs, for the tests of the back ends that run on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import pytest
from cuda_recorder import RecordedDriver
from pretended_sessions import PretendedSession
from tensorrt_world import Listener, World, make_world

from engram_trt.runtime.cuda_driver import CudaDriver
from engram_trt.runtime.stage_runners.onnxruntime_cuda import PROVIDER


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


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedDriver]:
    """For sessions of ONNX Runtime that pretend to run on it."""
    found = RecordedDriver(num_devices=2)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER, "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", PretendedSession)
    monkeypatch.setattr(CudaDriver, "open", classmethod(lambda cls, ordinal=0: CudaDriver(found, ordinal)))
    PretendedSession.providers.clear()
    PretendedSession.bound.clear()
    yield found
    assert found.unguarded == []
    assert found.depth == 0
