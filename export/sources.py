"""Which code made something: a digest over sources of this package. Without torch, for commands that start fast."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from engram_trt.plugins import spec as plugin_spec


@cache
def sources_digest(patterns: tuple[str, ...]) -> str:
    """SHA-256 (hex) over sources of this package.

    Args:
        patterns: `export/...` or `plugins/...`, where `*` stands for any name.
    """
    roots = {"export": Path(__file__).parent, "plugins": Path(plugin_spec.__file__).parent}
    digest = hashlib.sha256()
    for pattern in patterns:
        package, _, inner = pattern.partition("/")
        for path in sorted(roots[package].glob(inner)):
            digest.update(f"{package}/{path.relative_to(roots[package]).as_posix()}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
