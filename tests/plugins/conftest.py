"""Fixtures of the kernel tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def load_helper(name: str) -> ModuleType:
    """A helper module beside the tests, which importlib mode does not put on the path."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Any]:
    """The child process that interprets kernels; see `kernel_interpreter.py`."""
    child = load_helper("kernel_interpreter").KernelInterpreter()
    yield child
    child.close()


@pytest.fixture(scope="session")
def golden_ops() -> Path:
    """Folder of the committed golden op vectors."""
    return FOLDER.parent / "data" / "golden" / "ops"
