"""`Checkpoint`: a folder in the released layout, checked as a whole, then read through memory maps (spec 7)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engram_trt.configs.checkpoint_files import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    ShardIndex,
    file_in,
    listed,
    read_index,
    read_shards,
    tensor_entries,
)
from engram_trt.configs.errors import CheckpointError, ConfigError
from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
from engram_trt.configs.json_file import parse_json_object, read_bytes
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.safetensors_header import ShardHeader, TensorEntry
from engram_trt.configs.shard_reading import BLOCK_BYTES, check_scale_block, opened_shard, read_blocks

_SCAN_BYTES = BLOCK_BYTES

ByteMap = np.memmap[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: what it holds is exactly what its config asks for.

    Attributes:
        root: the folder, with links resolved.
        config: its model.
        partial_layers: the backbone layers of a partial checkpoint, None for a whole one.
        header_digest: SHA-256 (hex) of config, index, and the header and size of every shard that was read. It
            says whether two folders hold the same tensors at the same places, without reading the weights.
    """

    root: Path
    config: ModelConfig
    partial_layers: tuple[int, ...] | None
    header_digest: str
    _entries: Mapping[str, TensorEntry]
    _shards: Mapping[Path, ShardHeader]
    _maps: dict[Path, ByteMap] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path | str, *, layers: Collection[int] | None = None) -> Checkpoint:
        """Open and check a checkpoint; no weight is read.

        Args:
            path: the folder.
            layers: backbone layers to be used; None for all. With layers, only the shards that hold their
                tensors and the global text tensors need to be there.

        Raises:
            ConfigError: when `config.json` is not a model this project reads.
            CheckpointError: when the files are absent, damaged, hostile, contradict one another or the config.
        """
        root = _resolved(Path(path))
        config_path = file_in(root, CONFIG_NAME, str(root))
        config_text = read_bytes(config_path, CheckpointError, max_bytes=16 << 20)
        document = parse_json_object(config_text, str(config_path), CheckpointError)
        config = ModelConfig.from_dict(document, where=str(config_path))
        index = read_index(root)
        _check_partial(index, config, layers)
        expected = _expected_tensors(config_path, config, index)
        _check_names(index, expected)
        needed = expected if layers is None else checkpoint_tensors(config, layers)
        shards = read_shards(root, index, needed)
        entries = tensor_entries(shards)
        _check_shapes(entries, expected)
        _check_total(index, entries, is_whole=len(entries) == len(expected))
        return cls(
            root=root,
            config=config,
            partial_layers=index.partial_layers,
            header_digest=_digest(config_text, index, shards),
            _entries=entries,
            _shards={header.path: header for header in shards.values()},
        )

    @property
    def tokenizer_path(self) -> Path:
        """`tokenizer.json`; it may be absent. `CheckpointError` when it is a link out of the checkpoint."""
        return file_in(self.root, TOKENIZER_NAME, str(self.root))

    @property
    def shards(self) -> Mapping[str, ShardHeader]:
        """Headers of the shards that were read, by file name."""
        return {path.name: header for path, header in self._shards.items()}

    @property
    def shard_sizes(self) -> dict[Path, int]:
        """Bytes of every shard that was read, as they were when it was opened."""
        return {path: header.file_bytes for path, header in self._shards.items()}

    def names(self) -> tuple[str, ...]:
        """All tensors that can be read."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies; `CheckpointError` when it is not there."""
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(
                f"{self.root}: {name}",
                found="no such tensor" + ("" if self.partial_layers is None else " in a partial checkpoint"),
                expected="a tensor of this model",
                remedy="Open a checkpoint that holds this layer.",
            ) from None

    def bytes(self, name: str) -> ByteMap:
        """The raw bytes of a tensor: a read-only map, uint8 [nbytes]; pages are read when touched.

        Raises:
            CheckpointError: for an unknown tensor, or a shard that changed since it was opened.
        """
        entry = self.entry(name)
        shard = self._maps.get(entry.shard)
        if shard is None:
            shard = self._maps.setdefault(entry.shard, self._map(entry.shard))
        view: ByteMap = shard[entry.offset : entry.offset + entry.nbytes]  # type: ignore[assignment]
        return view

    def _map(self, shard: Path) -> ByteMap:
        with opened_shard(self._shards[shard]) as file:
            return np.memmap(file, dtype=np.uint8, mode="r", shape=(self._shards[shard].file_bytes,))

    def blocks(self, name: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """The raw bytes of a tensor, block by block, read and not mapped; see `read_blocks`."""
        entry = self.entry(name)
        return read_blocks(self._shards[entry.shard], entry, block_bytes)

    def expect(self, name: str) -> None:
        """Ask the system to read a tensor in the background; it may do nothing."""
        entry = self.entry(name)
        with opened_shard(self._shards[entry.shard]) as file:
            os.posix_fadvise(file.fileno(), entry.offset, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def header(self, name: str) -> ShardHeader:
        """The header of the shard that holds a tensor."""
        return self._shards[self.entry(name).shard]

    def require_unchanged(self, names: Iterable[str]) -> None:
        """Refuse shards of these tensors that were written to since the checkpoint was opened."""
        for shard in {self.entry(name).shard for name in names}:
            with opened_shard(self._shards[shard]):
                pass

    def check_scales(self, entry: TensorEntry) -> None:
        """Refuse an E8M0 scale that is NaN (byte 255); other dtypes hold no such scale and pass.

        The scan is by blocks, so a table of gigabytes needs no more memory than one.

        Raises:
            CheckpointError: naming the tensor and the first such row and block.
        """
        if entry.dtype != "F8_E8M0":
            return
        start = 0
        for block in self.blocks(entry.name, _SCAN_BYTES):
            check_scale_block(entry, start, block)
            start += len(block)


def _resolved(path: Path) -> Path:
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError):
        root = path
    if not root.is_dir():
        raise CheckpointError(
            str(path),
            found="a file" if root.is_file() else "no such folder",
            expected="a checkpoint folder",
            remedy="Check the path; `engram-trt synth` writes a synthetic checkpoint.",
        )
    return root


def _expected_tensors(config_path: Path, config: ModelConfig, index: ShardIndex) -> dict[str, TensorShape]:
    try:
        return checkpoint_tensors(config, index.partial_layers)
    except ConfigError as error:
        raise ConfigError(
            f"{config_path}: {error.where}", found=error.found, expected=error.expected, remedy=error.remedy
        ) from None


def _check_partial(index: ShardIndex, config: ModelConfig, layers: Collection[int] | None) -> None:
    partial = index.partial_layers
    if partial is None or layers is None:
        return
    absent = sorted(set(layers) - set(partial))
    if absent:
        raise CheckpointError(
            str(index.path),
            found=f"a partial checkpoint with layers {list(partial)}",
            expected=f"layers {absent} too",
            remedy=f"Write a checkpoint with them (`--layers`), out of {config.n_layers} layers.",
        )


def _check_names(index: ShardIndex, expected: Mapping[str, TensorShape]) -> None:
    missing = expected.keys() - index.weight_map.keys()
    extra = index.weight_map.keys() - expected.keys()
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing tensors ({listed(missing)})")
    if extra:
        parts.append(f"{len(extra)} unknown tensors ({listed(extra)})")
    raise CheckpointError(
        str(index.path),
        found=" and ".join(parts),
        expected=f"exactly the {len(expected)} tensors that {CONFIG_NAME} asks for",
        remedy="Use the config.json, index and shards of one revision.",
    )


def _check_shapes(entries: Mapping[str, TensorEntry], expected: Mapping[str, TensorShape]) -> None:
    wrong = [
        entry
        for name, entry in entries.items()
        if (entry.dtype, entry.shape) != (expected[name].dtype, expected[name].shape)
    ]
    if not wrong:
        return
    first = wrong[0]
    others = f" (and {len(wrong) - 1} other tensors differ)" if len(wrong) > 1 else ""
    raise CheckpointError(
        f"{first.shard}: {first.name}",
        found=f"{first.dtype} {list(first.shape)}{others}",
        expected=str(expected[first.name]),
        remedy="Use the config.json and shards of one revision, in the released layout.",
    )


def _check_total(index: ShardIndex, entries: Mapping[str, TensorEntry], *, is_whole: bool) -> None:
    total = sum(entry.nbytes for entry in entries.values())
    if is_whole and index.total_size is not None and index.total_size != total:
        raise CheckpointError(
            str(index.path),
            found=f"total_size {index.total_size:,}",
            expected=f"{total:,}, the bytes of all tensors",
            remedy="Fetch the index that belongs to these shards.",
        )


def _digest(config_text: bytes, index: ShardIndex, shards: Mapping[str, ShardHeader]) -> str:
    digest = hashlib.sha256()
    for text in (config_text, index.text):
        digest.update(hashlib.sha256(text).digest())
    for name in sorted(shards):
        digest.update(f"{name}\0{shards[name].file_bytes}\0{shards[name].digest}\n".encode())
    return digest.hexdigest()
