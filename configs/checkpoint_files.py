"""The files of a checkpoint folder: containment, the shard index, and the headers behind it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.json_file import parse_json_object, read_bytes
from engram_trt.configs.safetensors_header import MAX_ENTRIES, ShardHeader, TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
PARTIAL_KEY = "partial_layers"
_INCOMPLETE = "The download may be incomplete; fetch the checkpoint again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Which shard holds which tensor.

    Attributes:
        path: the index file, or the single weight file when there is no index.
        weight_map: shard file name by tensor name.
        total_size: the bytes of all tensors, where the index says so.
        partial_layers: the backbone layers of a partial checkpoint; None for a whole one.
        text: the raw index, for digests; empty without an index.
    """

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | None
    partial_layers: tuple[int, ...] | None
    text: bytes


def listed(names: Collection[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def containment_root(root: Path) -> Path:
    """The folder that links inside a checkpoint may point into.

    It is the checkpoint's own folder; in a hub cache, whose snapshots are links to a shared blob folder, it is
    the `models--owner--name` folder around both (`models--owner--name/snapshots/revision`).
    """
    model = root.parent.parent
    return model if root.parent.name == "snapshots" and model.name.startswith("models--") else root


def file_in(root: Path, name: str, where: str) -> Path:
    """The path of file `name` directly in `root` (already resolved), which must not lead outside.

    Raises:
        CheckpointError: for a name with folders in it, and for a link out of the checkpoint.
    """
    _require_plain(name, where)
    path = root / name
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(containment_root(root)):
        raise CheckpointError(
            where,
            found=f"{name!r}, a link to {target}",
            expected="a file inside the checkpoint",
            remedy="Copy the file into the checkpoint folder.",
        )
    return path


def _require_plain(name: str, where: str) -> None:
    if not name or name in (".", "..") or any(sign in name for sign in ("/", "\\", "\0")):
        raise CheckpointError(
            where,
            found=f"the file name {name[:200]!r}",
            expected="a plain file name",
            remedy="Do not use this checkpoint: a file name must not leave its folder.",
        )


def read_index(root: Path) -> ShardIndex:
    """Read the shard index of a checkpoint, or make one for a folder with a single `model.safetensors`.

    Raises:
        CheckpointError: for a folder without weights and for a damaged index.
    """
    if os.path.lexists(root / INDEX_NAME):
        return _parse_index(root)
    if not os.path.lexists(root / SINGLE_NAME):
        raise CheckpointError(
            str(root),
            found="no weights",
            expected=f"{INDEX_NAME} and its shards",
            remedy="Name a folder with a checkpoint in the released layout (`engram-trt synth` writes one).",
        )
    path = file_in(root, SINGLE_NAME, str(root))
    header = read_header(path)
    return ShardIndex(
        path=path,
        weight_map=dict.fromkeys(header.entries, SINGLE_NAME),
        total_size=None,
        partial_layers=None,
        text=b"",
    )


def _bad_index(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(str(path), found=found, expected=expected, remedy=_INCOMPLETE)


def _parse_index(root: Path) -> ShardIndex:
    path = file_in(root, INDEX_NAME, str(root))
    text = read_bytes(path, CheckpointError)
    document = parse_json_object(text, str(path), CheckpointError)
    metadata, weight_map = document.get("metadata", {}), document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, "no weight_map", "the shard of every tensor")
    if len(weight_map) > MAX_ENTRIES:
        raise _bad_index(path, f"{len(weight_map):,} tensors", f"at most {MAX_ENTRIES:,}")
    if not isinstance(metadata, dict):
        raise _bad_index(path, "metadata that is no object", "an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise _bad_index(path, f"{str(shard)[:80]!r} as the shard of {name}", "a .safetensors file name")
    for shard in set(weight_map.values()):
        _require_plain(shard, str(path))
    return ShardIndex(
        path=path,
        weight_map=weight_map,
        total_size=_total_size(path, metadata),
        partial_layers=_partial_layers(path, metadata),
        text=text,
    )


def _total_size(path: Path, metadata: Mapping[str, Any]) -> int | None:
    size = metadata.get("total_size")
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise _bad_index(path, f"total_size {str(size)[:40]}", "a number of bytes")
    return size


def _partial_layers(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...] | None:
    layers = metadata.get(PARTIAL_KEY)
    if layers is None:
        return None
    is_list = isinstance(layers, list) and all(type(layer_id) is int for layer_id in layers)
    if not is_list or len(layers) > 4096 or sorted(set(layers)) != layers:
        raise _bad_index(path, f"{PARTIAL_KEY} {str(layers)[:80]}", "ascending layer ids")
    return tuple(layers)


def read_shards(root: Path, index: ShardIndex, needed: Collection[str]) -> dict[str, ShardHeader]:
    """Read the headers of all shards that hold a needed tensor, and hold them against the index both ways.

    Raises:
        CheckpointError: listing absent shards; for a tensor that its shard lacks or that lives elsewhere; for a
            weight file that the index does not name.
    """
    names = sorted({index.weight_map[name] for name in needed if name in index.weight_map})
    paths = {name: file_in(root, name, str(index.path)) for name in sorted(set(index.weight_map.values()))}
    absent = [name for name in names if not paths[name].exists()]
    if absent:
        raise CheckpointError(
            str(root),
            found=f"{len(absent)} of {len(names)} shards missing: {listed(absent)}",
            expected=f"every shard that {index.path.name} names",
            remedy=_INCOMPLETE,
        )
    strays = [path.name for path in root.glob("*.safetensors") if path.name not in paths]
    if strays:
        raise CheckpointError(
            str(root),
            found=f"weight files that {index.path.name} does not name: {listed(strays)}",
            expected="only shards of this checkpoint",
            remedy="Move them away, or fetch the index that belongs to them.",
        )
    shards = {name: read_header(paths[name]) for name in names}
    for header in shards.values():
        _check_with_library(header)
    _check_both_ways(index, shards)
    return shards


def _check_with_library(header: ShardHeader) -> None:
    """Open a shard with the safetensors library too: a file that two readers see differently is not trusted."""
    found: str | None = None
    try:
        with safe_open(header.path, framework="numpy") as file:
            if set(file.keys()) != set(header.entries):
                found = "other tensors than its header lists"
    except (SafetensorError, OSError) as cause:
        found = f"a file that the safetensors library refuses ({cause})"
    if found is not None:
        raise CheckpointError(
            str(header.path), found=found, expected="a safetensors file", remedy="Fetch the shard again."
        )


def _check_both_ways(index: ShardIndex, shards: Mapping[str, ShardHeader]) -> None:
    holders: dict[str, list[str]] = {}
    for shard, header in shards.items():
        for name in header.entries:
            holders.setdefault(name, []).append(shard)
    for name, shard in index.weight_map.items():
        if shard in shards and name not in shards[shard].entries:
            elsewhere = listed(holders.get(name, []))
            raise CheckpointError(
                f"{index.path}: {name}",
                found=f"the shard {shard}, which lacks it" + (f"; it is in {elsewhere}" if elsewhere else ""),
                expected="the shard that holds the tensor",
                remedy="Fetch the index and the shards of one revision.",
            )
    for name, where in holders.items():
        stated = index.weight_map.get(name)
        if where != [stated]:
            raise CheckpointError(
                f"{index.path}: {name}",
                found=f"the tensor in {listed(where)}",
                expected=f"it in {stated} alone" if stated else "an index that names it",
                remedy="Fetch the index and the shards of one revision.",
            )


def tensor_entries(shards: Mapping[str, ShardHeader]) -> dict[str, TensorEntry]:
    """All tensors of the given shards by name."""
    return {name: entry for header in shards.values() for name, entry in header.entries.items()}
