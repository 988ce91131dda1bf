"""`EngramPlacement`: where the Engram tables live while a model runs. It never changes a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engram_trt.configs.errors import DeploymentError

RESIDENCIES = ("auto", "mmap", "packed", "host", "device")
"""`auto`: `host` for a table that fits comfortably, `mmap` for a larger one. `mmap`: rows are fetched from the
checkpoint's shards. `packed`: rows are fetched from a packed file. `host`: in memory. `device`: held by the back
end, whole or in shards."""
SHARDINGS = ("rows", "columns")
_MOST = {"num_threads": 256, "cache_mib": 1 << 20, "num_shards": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramPlacement:
    """The `[engram]` table of a deployment file.

    Attributes:
        residency: of every table, one of `RESIDENCIES`.
        layers: (layer id, residency) of tables that differ; in a file `layers = { 14 = "mmap" }`.
        packed_folder: where `engram-trt pack-engram` wrote; `host` and `device` are then filled from there.
        num_threads: threads that fetch rows and fill memory.
        cache_mib: memory of the hot-row cache of one fetched table, in MiB; 0 for none.
        share_host: one copy of a `host` table for all processes of the machine (in `/dev/shm`).
        num_shards: parts of a `device` table.
        shard_by: `rows` for equal runs of rows, `columns` for whole hash columns.

    Raises:
        DeploymentError: on construction, naming the key.
    """

    residency: str = "auto"
    layers: tuple[tuple[int, str], ...] = ()
    packed_folder: str = ""
    num_threads: int = 2
    cache_mib: int = 64
    share_host: bool = True
    num_shards: int = 1
    shard_by: str = "rows"

    def __post_init__(self) -> None:
        for key, residency in (("residency", self.residency), *((f"layers.{n}", name) for n, name in self.layers)):
            if residency not in RESIDENCIES:
                _bad(key, repr(residency), " or ".join(RESIDENCIES))
            if residency == "packed" and not self.packed_folder:
                _bad("packed_folder", "none", "the folder of the packed files: the residency is 'packed'")
        if self.shard_by not in SHARDINGS:
            _bad("shard_by", repr(self.shard_by), " or ".join(SHARDINGS))
        for key, most in _MOST.items():
            least = 0 if key == "cache_mib" else 1
            if not least <= getattr(self, key) <= most:
                _bad(key, str(getattr(self, key)), f"{least}..{most}")

    def of_layer(self, layer_id: int) -> str:
        """Residency of one layer's table."""
        return dict(self.layers).get(layer_id, self.residency)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `from_dict` reads back."""
        return {
            "residency": self.residency,
            "layers": {str(layer_id): residency for layer_id, residency in self.layers},
            "packed_folder": self.packed_folder,
            "num_threads": self.num_threads,
            "cache_mib": self.cache_mib,
            "share_host": self.share_host,
            "num_shards": self.num_shards,
            "shard_by": self.shard_by,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngramPlacement:
        """Build from values whose names and types were checked, except those of `layers`."""
        layers = values.get("layers", {})
        pairs = []
        for key, residency in layers.items():
            if not (key.isascii() and key.isdigit() and len(key) < 6):
                _bad(f"layers.{key}", repr(key), "a layer id")
            pairs.append((int(key), str(residency)))
        return cls(**{**values, "layers": tuple(sorted(pairs))})


def _bad(key: str, found: str, expected: str) -> NoReturn:
    raise DeploymentError(f"engram.{key}", found=found, expected=expected, remedy="Correct the deployment.")
