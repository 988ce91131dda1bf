"""Opening checkpoints: what is there is exactly what the config asks for, or one clear error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engram_trt.configs import checkpoint as checkpoint_module
from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import CheckpointError, ConfigError, UserError
from engram_trt.configs.inventory import checkpoint_tensors
from engram_trt.export.synth import SynthRequest, synthesize

Shards = tuple[Callable[..., Any], Callable[..., Any]]
INDEX = "model.safetensors.index.json"


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / INDEX).read_text())
    edit(document)
    (folder / INDEX).write_text(json.dumps(document))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rejection(folder: Path, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        Checkpoint.open(folder, **options)
    return caught.value


def test_every_tensor_is_there_with_the_bytes_of_its_file(pristine_checkpoint: Path) -> None:
    opened = Checkpoint.open(pristine_checkpoint)
    expected = checkpoint_tensors(opened.config)
    assert set(opened.names()) == set(expected)
    assert opened.partial_layers is None
    for shard in pristine_checkpoint.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                value = file.get_tensor(name).contiguous()
                entry = opened.entry(name)
                assert entry.shape == expected[name].shape == tuple(value.shape)
                assert entry.shard.name == shard.name
                stored = opened.bytes(name)
                assert stored.dtype == np.uint8
                assert stored.shape == (entry.nbytes,)
                assert not stored.flags.writeable
                assert stored.tobytes() == value.view(-1).view(torch.uint8).numpy().tobytes()


def test_opening_reads_no_weights_and_maps_each_shard_once(pristine_checkpoint: Path) -> None:
    opened = Checkpoint.open(pristine_checkpoint)
    first, second = opened.bytes("embed.weight"), opened.bytes("embed.weight")
    assert isinstance(first, np.memmap)
    assert np.shares_memory(first, second)


def test_the_digest_follows_headers_and_config_but_not_the_place(
    pristine_checkpoint: Path, checkpoint_folder: Path
) -> None:
    digest = Checkpoint.open(pristine_checkpoint).header_digest
    assert Checkpoint.open(checkpoint_folder).header_digest == digest
    config = json.loads((checkpoint_folder / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 9.0
    (checkpoint_folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(checkpoint_folder).header_digest != digest


def test_an_absent_tensor_has_no_bytes(pristine_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.engram"):
        Checkpoint.open(pristine_checkpoint).bytes("layers.0.engram.embed.weight")


@pytest.mark.parametrize("path", ["", "absent", "config.json"])
def test_what_is_no_folder_is_an_error(pristine_checkpoint: Path, tmp_path: Path, path: str) -> None:
    if path == "config.json":
        assert rejection(pristine_checkpoint / path).found == "a file"
    elif path:
        assert "no such folder" in rejection(tmp_path / path).found
    else:
        assert "config.json" in rejection(tmp_path).where


def test_a_folder_without_weights_is_an_error(checkpoint_folder: Path) -> None:
    (checkpoint_folder / INDEX).unlink()
    assert rejection(checkpoint_folder).found == "no weights"


def test_a_broken_config_is_a_config_error(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint.open(checkpoint_folder)


def test_a_config_of_float_weights_is_a_config_error(checkpoint_folder: Path) -> None:
    config = json.loads((checkpoint_folder / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint_folder / "config.json").write_text(json.dumps(config))
    error = rejection(checkpoint_folder)
    assert isinstance(error, ConfigError)
    assert error.where == f"{checkpoint_folder / 'config.json'}: quantization_config"


# --- shards -----------------------------------------------------------------------------------------------


def test_missing_shards_are_listed(checkpoint_folder: Path) -> None:
    gone = sorted(checkpoint_folder.glob("*.safetensors"))[1:3]
    for shard in gone:
        shard.unlink()
    error = rejection(checkpoint_folder)
    assert error.found.startswith("2 of ")
    assert all(shard.name in error.found for shard in gone)
    assert "incomplete" in error.remedy


@pytest.mark.parametrize("lost", [1, 1000, 100_000])
def test_a_truncated_shard_is_refused_at_open(checkpoint_folder: Path, shards: Shards, lost: int) -> None:
    shard = shard_of(checkpoint_folder, "layers.1.attn.wq_a.weight")
    size = shard.stat().st_size
    header, data = shards[0](shard)
    header.pop("__metadata__")
    ends = {name: entry["data_offsets"][1] for name, entry in header.items()}
    first_lost = min((name for name in ends if ends[name] > len(data) - lost), key=ends.__getitem__)
    os.truncate(shard, size - lost)
    error = rejection(checkpoint_folder)
    assert error.where.endswith(shard.name)
    assert error.found == f"{size - lost:,} bytes, so that {first_lost} is the first tensor past the end"
    assert error.expected == f"{size:,} bytes"


def test_an_empty_shard_is_refused(checkpoint_folder: Path) -> None:
    shard = shard_of(checkpoint_folder, "head.weight")
    shard.write_bytes(b"")
    assert shard.name in rejection(checkpoint_folder).where


def test_a_stray_weight_file_is_refused(checkpoint_folder: Path) -> None:
    shutil.copy(shard_of(checkpoint_folder, "head.weight"), checkpoint_folder / "extra.safetensors")
    assert "extra.safetensors" in rejection(checkpoint_folder).found


def test_a_shard_that_changes_after_opening_is_refused(checkpoint_folder: Path) -> None:
    opened = Checkpoint.open(checkpoint_folder)
    os.truncate(shard_of(checkpoint_folder, "head.weight"), 100)
    with pytest.raises(CheckpointError, match="100 bytes"):
        opened.bytes("head.weight")


def test_a_shard_that_vanishes_after_opening_is_refused(checkpoint_folder: Path) -> None:
    opened = Checkpoint.open(checkpoint_folder)
    shard_of(checkpoint_folder, "head.weight").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened.bytes("head.weight")


def test_a_shard_rewritten_in_place_after_opening_is_refused(checkpoint_folder: Path) -> None:
    """The same size, other bytes: told by the time of the last change."""
    opened = Checkpoint.open(checkpoint_folder)
    shard = shard_of(checkpoint_folder, "head.weight")
    shard.write_bytes(shard.read_bytes())
    os.utime(shard, ns=(1, 1))
    for read in (opened.bytes, lambda name: list(opened.blocks(name)), lambda name: opened.require_unchanged([name])):
        with pytest.raises(CheckpointError, match=r"written to or replaced.*run the same command again"):
            read("head.weight")
    opened.require_unchanged(["embed.weight"])


def test_a_shard_that_changes_while_it_is_read_is_refused(checkpoint_folder: Path) -> None:
    opened = Checkpoint.open(checkpoint_folder)
    blocks = opened.blocks("head.weight", 1000)
    assert len(next(blocks)) == 1000
    os.utime(shard_of(checkpoint_folder, "head.weight"), ns=(1, 1))
    with pytest.raises(CheckpointError, match="written to or replaced"):
        list(blocks)
    blocks = Checkpoint.open(checkpoint_folder).blocks("head.weight", 1000)
    next(blocks)
    os.truncate(shard_of(checkpoint_folder, "head.weight"), 100)
    with pytest.raises(CheckpointError, match=r"bytes of head\.weight"):
        list(blocks)


def test_blocks_are_the_bytes(checkpoint_folder: Path) -> None:
    opened = Checkpoint.open(checkpoint_folder)
    whole = b"".join(opened.blocks("head.weight", 1000))
    assert whole == opened.bytes("head.weight").tobytes()


# --- index ------------------------------------------------------------------------------------------------


def test_an_index_that_names_the_wrong_shard_is_refused(checkpoint_folder: Path) -> None:
    name = "layers.1.attn.wq_a.weight"
    right, wrong = shard_of(checkpoint_folder, name), shard_of(checkpoint_folder, "head.weight")
    edit_index(checkpoint_folder, lambda index: index["weight_map"].update({name: wrong.name}))
    error = rejection(checkpoint_folder)
    assert name in error.where
    assert wrong.name in error.found
    assert right.name in error.found


def test_an_index_that_names_an_absent_shard_is_refused(checkpoint_folder: Path) -> None:
    edit_index(checkpoint_folder, lambda index: index["weight_map"].update({"norm.weight": "x.safetensors"}))
    assert "x.safetensors" in rejection(checkpoint_folder).found


def test_a_tensor_that_the_index_does_not_name_is_refused(checkpoint_folder: Path, shards: Shards) -> None:
    read, write = shards
    shard = shard_of(checkpoint_folder, "norm.weight")
    header, data = read(shard)
    header["stowaway"] = {"dtype": "I8", "shape": [3], "data_offsets": [len(data), len(data) + 3]}
    write(shard, header, data + b"\0\0\0")
    error = rejection(checkpoint_folder)
    assert "stowaway" in error.where
    assert shard.name in error.found


def test_a_tensor_in_two_shards_is_refused(checkpoint_folder: Path, shards: Shards) -> None:
    read, write = shards
    shard = shard_of(checkpoint_folder, "head.weight")
    header, data = read(shard)
    header["embed.weight"] = {"dtype": "I8", "shape": [1], "data_offsets": [len(data), len(data) + 1]}
    write(shard, header, data + b"\0")
    error = rejection(checkpoint_folder)
    assert "embed.weight" in error.where
    assert shard.name in error.found


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors", "..\\b.safetensors", "\0.safetensors"],
)
def test_a_shard_name_with_a_path_is_refused(checkpoint_folder: Path, name: str) -> None:
    edit_index(checkpoint_folder, lambda index: index["weight_map"].update({"norm.weight": name}))
    assert "plain file name" in rejection(checkpoint_folder).expected


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.update(weight_map={}),
        lambda index: index.update(weight_map=["head.weight"]),
        lambda index: index["weight_map"].update({"norm.weight": 3}),
        lambda index: index["weight_map"].update({"norm.weight": "pytorch_model.bin"}),
        lambda index: index.update(metadata=[]),
        lambda index: index["metadata"].update(total_size="big"),
        lambda index: index["metadata"].update(total_size=12),
        lambda index: index["metadata"].update(partial_layers="all"),
        lambda index: index["metadata"].update(partial_layers=[2, 1]),
        lambda index: index["metadata"].update(partial_layers=[True]),
    ],
)
def test_a_damaged_index_is_refused(checkpoint_folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_index(checkpoint_folder, edit)
    assert INDEX in rejection(checkpoint_folder).where


def test_an_index_that_is_no_json_is_refused(checkpoint_folder: Path) -> None:
    (checkpoint_folder / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}')
    assert "twice" in rejection(checkpoint_folder).found


# --- coverage ---------------------------------------------------------------------------------------------


def drop(folder: Path, shards: Shards, name: str) -> None:
    """Take a tensor out of its shard and out of the index."""
    read, write = shards
    shard = shard_of(folder, name)
    header, data = read(shard)
    begin, end = header.pop(name)["data_offsets"]
    for other, entry in header.items():
        if other != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    write(shard, header, data[:begin] + data[end:])
    edit_index(folder, lambda index: index["weight_map"].pop(name))
    edit_index(folder, lambda index: index["metadata"].pop("total_size", None))


@pytest.mark.parametrize("name", ["layers.2.attn.indexer.wk.weight", "layers.0.ffn.experts.5.w2.scale", "norm.weight"])
def test_a_missing_tensor_is_named(checkpoint_folder: Path, shards: Shards, name: str) -> None:
    drop(checkpoint_folder, shards, name)
    assert rejection(checkpoint_folder).found == f"1 missing tensors ({name})"


def test_many_missing_tensors_are_counted(checkpoint_folder: Path, shards: Shards) -> None:
    for expert in range(6):
        drop(checkpoint_folder, shards, f"layers.1.ffn.experts.{expert}.w1.weight")
    error = rejection(checkpoint_folder)
    assert error.found.startswith("6 missing tensors (layers.1.ffn.experts.0.w1.weight, ")
    assert error.found.endswith("and 2 more)")


def test_an_unknown_tensor_is_named(checkpoint_folder: Path, shards: Shards) -> None:
    read, write = shards
    shard = shard_of(checkpoint_folder, "norm.weight")
    header, data = read(shard)
    header["layers.0.attn.ape"] = {"dtype": "I8", "shape": [3], "data_offsets": [len(data), len(data) + 3]}
    write(shard, header, data + b"\0\0\0")
    edit_index(checkpoint_folder, lambda index: index["weight_map"].update({"layers.0.attn.ape": shard.name}))
    assert rejection(checkpoint_folder).found == "1 unknown tensors (layers.0.attn.ape)"


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("layers.1.attn.wq_a.weight", {"shape": [64, 32]}, "F8_E4M3 [64, 32]"),
        ("layers.1.attn.wq_a.weight", {"dtype": "I8"}, "I8 [32, 64]"),
        ("layers.1.attn.wq_a.scale", {"dtype": "U8"}, "U8 [1, 2]"),
        ("layers.1.attn.wq_a.scale", {"shape": [2, 1]}, "F8_E8M0 [2, 1]"),
        ("layers.1.attn.attn_sink", {"shape": [2, 2]}, "F32 [2, 2]"),
        ("layers.3.engram.embed.scale", {"shape": [1, 384]}, "F8_E8M0 [1, 384]"),
    ],
)
def test_a_misshapen_or_mistyped_tensor_is_named(
    checkpoint_folder: Path, shards: Shards, name: str, change: dict[str, Any], found: str
) -> None:
    read, write = shards
    shard = shard_of(checkpoint_folder, name)
    header, data = read(shard)
    header[name] |= change
    write(shard, header, data)
    error = rejection(checkpoint_folder)
    assert error.where.endswith(f"{shard.name}: {name}")
    assert error.found == found
    assert error.expected != found


def test_a_scale_grid_of_another_size_is_refused(checkpoint_folder: Path, shards: Shards) -> None:
    """A grid for larger tiles loads in careless readers and is wrong everywhere."""
    read, write = shards
    name = "layers.1.ffn.shared_experts.w1.scale"
    shard = shard_of(checkpoint_folder, name)
    header, data = read(shard)
    begin, end = header[name]["data_offsets"]
    assert end - begin == 2
    header[name] |= {"shape": [1, 1], "data_offsets": [begin, begin + 1]}
    for other, entry in header.items():
        if other != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - 1 for offset in entry["data_offsets"]]
    write(shard, header, data[: begin + 1] + data[end:])
    error = rejection(checkpoint_folder)
    assert name in error.where
    assert error.expected == "F8_E8M0 [1, 2]"


def test_a_config_of_another_model_is_refused(checkpoint_folder: Path) -> None:
    config = json.loads((checkpoint_folder / "config.json").read_text())
    config["text_config"]["n_routed_experts"] = 7
    (checkpoint_folder / "config.json").write_text(json.dumps(config))
    assert "missing tensors (layers.0.ffn.experts.6" in rejection(checkpoint_folder).found


# --- scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan_bytes", [64 << 20, 5])
def test_a_nan_scale_is_named_by_row_and_block(
    checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch, scan_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint_module, "_SCAN_BYTES", scan_bytes)
    name = "layers.2.ffn.experts.1.w1.scale"
    opened = Checkpoint.open(checkpoint_folder)
    entry = opened.entry(name)
    opened.check_scales(entry)
    assert entry.shape == (32, 2)
    with entry.shard.open("r+b") as file:
        file.seek(entry.offset + 17 * 2 + 1)
        file.write(b"\xff")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(checkpoint_folder).check_scales(entry)
    assert name in caught.value.where
    assert "row 17, block 1" in caught.value.found


def test_byte_255_is_no_scale_in_other_dtypes(checkpoint_folder: Path) -> None:
    opened = Checkpoint.open(checkpoint_folder)
    entry = opened.entry("layers.2.ffn.experts.1.w1.weight")
    with entry.shard.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff")
    Checkpoint.open(checkpoint_folder).check_scales(entry)


# --- links ------------------------------------------------------------------------------------------------


def hub_copy(source: Path, hub: Path) -> Path:
    """The folder layout of a hub cache: a snapshot of links to shared blobs."""
    snapshot, blobs = hub / "models--owner--name" / "snapshots" / "abc", hub / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def test_a_hub_snapshot_opens(pristine_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = hub_copy(pristine_checkpoint, tmp_path)
    opened = Checkpoint.open(snapshot)
    assert opened.header_digest == Checkpoint.open(pristine_checkpoint).header_digest
    assert opened.tokenizer_path.name == "tokenizer.json"


def test_a_link_to_the_whole_folder_opens(pristine_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pristine_checkpoint)
    assert Checkpoint.open(tmp_path / "link").root == pristine_checkpoint.resolve()


@pytest.mark.parametrize("name", ["config.json", INDEX, "shard", "tokenizer.json"])
def test_a_link_out_of_the_checkpoint_is_refused(checkpoint_folder: Path, tmp_path: Path, name: str) -> None:
    inside = shard_of(checkpoint_folder, "head.weight") if name == "shard" else checkpoint_folder / name
    outside = tmp_path / "outside"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    with pytest.raises(CheckpointError) as caught:
        _ = Checkpoint.open(checkpoint_folder).tokenizer_path
    assert str(outside) in caught.value.found


def test_a_hub_snapshot_must_not_reach_into_another_model(pristine_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = hub_copy(pristine_checkpoint, tmp_path)
    other = tmp_path / "models--other--name"
    other.mkdir()
    shutil.copy(pristine_checkpoint / "config.json", other / "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "config.json")
    assert "inside the checkpoint" in rejection(snapshot).expected


def test_a_link_loop_is_an_error(checkpoint_folder: Path) -> None:
    shard = shard_of(checkpoint_folder, "head.weight")
    shard.unlink()
    shard.symlink_to(shard.name)
    assert isinstance(rejection(checkpoint_folder), CheckpointError)


# --- partial checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def partial_folder(pristine_checkpoint: Path, tmp_path: Path) -> Path:
    config = Checkpoint.open(pristine_checkpoint).config
    synthesize(SynthRequest(config=config, out=tmp_path / "partial", seed=3, layers=(3, 1)))
    return tmp_path / "partial"


def test_a_partial_checkpoint_opens_as_such(pristine_checkpoint: Path, partial_folder: Path) -> None:
    whole, partial = Checkpoint.open(pristine_checkpoint), Checkpoint.open(partial_folder)
    assert partial.partial_layers == (1, 3)
    assert set(partial.names()) == set(checkpoint_tensors(whole.config, (1, 3)))
    for name in partial.names():
        assert partial.bytes(name).tobytes() == whole.bytes(name).tobytes()
    with pytest.raises(CheckpointError, match="partial"):
        partial.entry("layers.2.attn.wq_a.weight")


def test_layers_that_a_partial_checkpoint_lacks_are_named(partial_folder: Path) -> None:
    assert Checkpoint.open(partial_folder, layers=(3,)).partial_layers == (1, 3)
    assert "layers [0]" in rejection(partial_folder, layers=(0, 1)).expected


def test_a_partial_checkpoint_that_hides_its_nature_is_refused(partial_folder: Path) -> None:
    edit_index(partial_folder, lambda index: index["metadata"].pop("partial_layers"))
    assert "missing tensors" in rejection(partial_folder).found


def test_with_layers_only_their_shards_are_needed(checkpoint_folder: Path) -> None:
    shard_of(checkpoint_folder, "layers.0.attn.wq_a.weight").unlink()
    shard_of(checkpoint_folder, "layers.3.engram.q_weight").unlink()
    opened = Checkpoint.open(checkpoint_folder, layers=(1, 2))
    assert "layers.2.attn.wq_a.weight" in opened.names()
    assert "layers.0.attn.wq_a.weight" not in opened.names()
    assert "2 of " in rejection(checkpoint_folder).found


def test_a_single_file_without_an_index_opens(pristine_checkpoint: Path, tmp_path: Path, shards: Shards) -> None:
    read, write = shards
    header, data = {}, b""
    for shard in sorted(pristine_checkpoint.glob("*.safetensors")):
        part, part_data = read(shard)
        for name, entry in part.items():
            if name != "__metadata__":
                entry["data_offsets"] = [offset + len(data) for offset in entry["data_offsets"]]
                header[name] = entry
        data += part_data
    write(tmp_path / "model.safetensors", header, data)
    shutil.copy(pristine_checkpoint / "config.json", tmp_path)
    opened, whole = Checkpoint.open(tmp_path), Checkpoint.open(pristine_checkpoint)
    assert opened.bytes("head.weight").tobytes() == whole.bytes("head.weight").tobytes()
