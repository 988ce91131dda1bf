"""Writes a synthetic checkpoint in the released layout: shards, index, config and tokenizer (spec 7)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engram_trt.configs.checkpoint_files import CONFIG_NAME, INDEX_NAME, PARTIAL_KEY, TOKENIZER_NAME
from engram_trt.configs.errors import CheckpointError, TokenizerError
from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
from engram_trt.configs.json_file import read_bytes
from engram_trt.configs.model import ModelConfig
from engram_trt.export.atomic_folder import atomic_folder, require_replaceable
from engram_trt.export.synth_shards import ShardWriter, split_into_shards, tensor_bytes
from engram_trt.export.synth_tokenizer import TokenizerFiles, train_tokenizer
from engram_trt.export.synth_weights import tensor_pieces
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPARSE_TABLE_BYTES = 4 << 30
"""An Engram table above this size is left as a hole in its file, unless dense tables are asked for."""

Progress = Callable[[str, int], None]
"""Called with the current shard and the bytes just written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthRequest:
    """What to write.

    Attributes:
        config: the model; its compressed vocabulary size is replaced by that of the tokenizer.
        out: the folder to make.
        seed: of the weights.
        layers: backbone layers of a partial checkpoint; None for a whole one.
        tokenizer: a tokenizer.json to copy; None trains a small one.
        dense_tables: write random rows to Engram tables of any size.
        sparse: write headers only and leave every tensor a hole, which reads as zeros.
        force: replace an earlier checkpoint at `out`.
    """

    config: ModelConfig
    out: Path
    seed: int = 0
    layers: tuple[int, ...] | None = None
    tokenizer: Path | None = None
    dense_tables: bool = False
    sparse: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthReport:
    """What was written: the folder, its config, and counts of tensors, shards and tensor bytes."""

    out: Path
    config: ModelConfig
    num_tensors: int
    num_shards: int
    num_bytes: int


def bytes_to_write(request: SynthRequest) -> int:
    """Bytes of weights that a request really writes; holes do not count."""
    if request.sparse:
        return 0
    tensors = checkpoint_tensors(request.config, request.layers)
    return sum(
        tensor_bytes(shape) for name, shape in tensors.items() if not _is_hole(name, tensors, request.dense_tables)
    )


def synthesize(request: SynthRequest, progress: Progress = lambda shard, num_bytes: None) -> SynthReport:
    """Write the checkpoint; the folder appears when it is complete, or not at all.

    Raises:
        ConfigError: for a config that is not of the released layout.
        TokenizerError: for a tokenizer that does not fit the config.
        CheckpointError: when the folder may not be replaced or the disk has no room.
    """
    require_replaceable(request.out, force=request.force, marks=(CONFIG_NAME, INDEX_NAME), error=CheckpointError)
    tensors = checkpoint_tensors(request.config, request.layers)
    _check_room(request.out, bytes_to_write(request))
    with atomic_folder(request.out, CheckpointError, replace=request.force) as folder:
        config = _write_tokenizer(folder, request)
        _write_json(folder / CONFIG_NAME, config.to_hf_dict())
        shards = split_into_shards(tensors)
        for file_name, shard in shards.items():
            _write_shard(folder / file_name, shard, request, progress)
        total = sum(tensor_bytes(shape) for shape in tensors.values())
        _write_json(folder / INDEX_NAME, _index(shards, total, request.layers))
    return SynthReport(
        out=request.out,
        config=config,
        num_tensors=len(tensors),
        num_shards=len(shards),
        num_bytes=total,
    )


def _check_room(out: Path, needed: int) -> None:
    folder = Path(os.path.abspath(out)).parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            str(out),
            found=f"{free / 2**30:.1f} GiB of free disk space",
            expected=f"{needed / 2**30:.1f} GiB",
            remedy="Free some room, write fewer --layers, or name a folder on another disk.",
        )


def _write_tokenizer(folder: Path, request: SynthRequest) -> ModelConfig:
    """Write the tokenizer and return the config with the numbers that follow from it."""
    config = request.config
    contents = train_tokenizer(config) if request.tokenizer is None else _copied(request.tokenizer)
    _write(folder / TOKENIZER_NAME, contents.tokenizer)
    _write(folder / TOKENIZER_CONFIG_NAME, contents.tokenizer_config)
    tokenizer = Tokenizer.open(folder / TOKENIZER_NAME)
    if tokenizer.vocab_size != config.vocab_size:
        raise TokenizerError(
            str(request.tokenizer),
            found=f"{tokenizer.vocab_size} ids",
            expected=f"{config.vocab_size}, the config's vocab_size",
            remedy="Use a tokenizer of that size, or change the config.",
        )
    if not config.has_engram:
        return config
    return replace(config, engram_compressed_vocab_size=TokenMap.build(tokenizer).num_classes)


def _copied(path: Path) -> TokenizerFiles:
    text = read_bytes(path, TokenizerError)
    beside = path.with_name(TOKENIZER_CONFIG_NAME)
    config = read_bytes(beside, TokenizerError) if beside.is_file() else b"{}\n"
    return TokenizerFiles(tokenizer=text, tokenizer_config=config)


def _write_shard(path: Path, shard: Mapping[str, TensorShape], request: SynthRequest, progress: Progress) -> None:
    with ShardWriter(path, shard) as writer:
        for name, shape in () if request.sparse else shard.items():
            if name.endswith(".scale") or _is_hole(name, shard, request.dense_tables):
                continue
            scale = shard.get(_scale_of(name)) if name.endswith(".weight") else None
            pieces = tensor_pieces(name, shape, scale, request.seed, is_table=_is_table(name))
            for piece, offset, data in pieces:
                writer.write(piece, offset, data)
                progress(path.name, data.size)


def _scale_of(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _is_table(name: str) -> bool:
    return name.endswith((".engram.embed.weight", ".engram.embed.scale"))


def _is_hole(name: str, tensors: Mapping[str, TensorShape], dense_tables: bool) -> bool:
    """Whether a tensor is left unwritten: a huge table, or the scales of one."""
    if dense_tables or not _is_table(name):
        return False
    return tensor_bytes(tensors[name.removesuffix(".scale").removesuffix(".weight") + ".weight"]) > SPARSE_TABLE_BYTES


def _index(
    shards: Mapping[str, Mapping[str, TensorShape]], total: int, layers: Collection[int] | None
) -> dict[str, object]:
    metadata: dict[str, object] = {"total_size": total}
    if layers is not None:
        metadata[PARTIAL_KEY] = sorted(set(layers))
    weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    _write(path, (json.dumps(document, indent=1) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
