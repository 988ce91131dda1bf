"""Traced graphs, kept between exports: tracing a kind of layer takes seconds and depends on no weight.

Graphs lie in `$XDG_CACHE_HOME/engram-trt/graphs` (`~/.cache` by default) under a key of everything they were made
from, so a graph of older code or tools is never found. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

MAX_GRAPHS = 256
"""Graphs kept on the disk; the ones unused longest go first."""

_DIGEST_BYTES = 32


def default_folder() -> Path:
    """Where graphs are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "engram-trt" / "graphs"


class GraphStore:
    """Graphs by key, in memory and on the disk.

    A file that is damaged, or a folder that cannot be written, costs a trace and nothing else.

    Args:
        folder: on the disk; None keeps graphs in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._graphs: dict[str, onnx.ModelProto] = {}

    def find(self, key: str) -> onnx.ModelProto | None:
        """The graph, or None; do not change it."""
        if key not in self._graphs:
            found = self._read(key)
            if found is None:
                return None
            self._graphs[key] = found
        return self._graphs[key]

    def add(self, key: str, model: onnx.ModelProto) -> None:
        """Keep a graph."""
        self._graphs[key] = model
        if self._folder is None:
            return
        content = model.SerializeToString()
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(content).digest() + content)
            partial.replace(path)
            self._prune()

    def _path(self, key: str) -> Path:
        return (self._folder or Path()) / f"{key}.graph"

    def _read(self, key: str) -> onnx.ModelProto | None:
        if self._folder is None:
            return None
        try:
            data = self._path(key).read_bytes()
            content = data[_DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
                return None
            os.utime(self._path(key))
            return onnx.load_from_string(content)
        except (OSError, DecodeError):
            return None

    def _prune(self) -> None:
        files = sorted((self._folder or Path()).glob("*.graph"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_GRAPHS]:
            path.unlink(missing_ok=True)
