"""TensorRT's timing cache on the disk, behind a digest of its own: TensorRT trusts what it is given."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engram_trt.configs.errors import ArtifactError
from engram_trt.export.atomic_folder import write_atomically

_DIGEST_BYTES = 32


def load_timing_cache(path: Path) -> bytes:
    """The cache's content; empty where there is none.

    Raises:
        ArtifactError: the file was cut off or changed.
    """
    if not path.is_file():
        return b""
    content = path.read_bytes()
    digest, cache = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cache).digest() != digest:
        raise ArtifactError(
            str(path),
            found=f"{len(content):,} bytes that are not what was written",
            expected="a timing cache",
            remedy="Delete the file; the next build takes longer and writes a new one.",
        )
    return cache


def save_timing_cache(path: Path, cache: bytes) -> None:
    """Write a cache, whole or not at all."""
    write_atomically(path, hashlib.sha256(cache).digest() + cache)
