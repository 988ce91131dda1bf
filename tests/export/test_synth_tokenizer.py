"""The trained tokenizer: exact size, byte coverage, case variants, placed special ids, the same bytes each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.synth_tokenizer import special_tokens, train_tokenizer
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(model_preset("tiny")).tokenizer)
    return Tokenizer.open(path, model_preset("tiny"))


def test_the_preset_states_the_number_of_classes_of_its_tokenizer(tiny: Tokenizer) -> None:
    config = model_preset("tiny")
    token_map = TokenMap.for_model(tiny, config)
    assert token_map.num_classes == config.engram_compressed_vocab_size


def test_case_variants_share_a_class_and_partial_characters_exist(tiny: Tokenizer) -> None:
    token_map = TokenMap.build(tiny)
    texts = tiny.token_texts()
    the = {int(token_map.ids[texts.index(text)]) for text in (" the", "The", " The", " THE")}
    assert len(the) == 1
    assert len([text for text in texts if "\ufffd" in text]) > 100
    assert token_map.num_classes < tiny.vocab_size


def test_special_ids_are_where_the_config_puts_them(tiny: Tokenizer) -> None:
    names = [tiny.token_name(token_id) for token_id in range(5)]
    assert names[:3] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    assert special_tokens(model_preset("tiny")) == dict(enumerate(names))


def test_scattered_special_ids_and_a_small_vocabulary() -> None:
    path = Path(__file__).parents[1] / "data" / "configs" / "vl_dspark7.json"
    config = ModelConfig.from_file(path)
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(config).tokenizer.decode())
    assert backend.get_vocab_size() == 320
    assert backend.id_to_token(300) == "<｜image｜>"
    assert backend.id_to_token(319) == "<｜draft▁noise｜>"
    assert backend.decode(backend.encode("Grüße 🙂").ids) == "Grüße 🙂"


def test_a_vocabulary_beyond_the_text_is_filled_up() -> None:
    flat = model_preset("tiny").to_flat_dict() | {"vocab_size": 20_000}
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(ModelConfig.from_dict(flat)).tokenizer.decode())
    assert backend.get_vocab_size() == 20_000
    assert backend.id_to_token(19_999) == "<unused_19999>"


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    flat = model_preset("tiny").to_flat_dict() | {"vocab_size": 260, "engram_compressed_vocab_size": 200}
    with pytest.raises(ConfigError, match=r"vocab_size: found 260; expected at least 261"):
        train_tokenizer(ModelConfig.from_dict(flat))


def test_training_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import hashlib\n"
        "from engram_trt.configs.preset_files import model_preset\n"
        "from engram_trt.export.synth_tokenizer import train_tokenizer\n"
        "print(hashlib.sha256(train_tokenizer(model_preset('tiny')).tokenizer).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"))
    ]
    assert runs[0] == runs[1]


def test_the_config_beside_it_names_the_special_tokens() -> None:
    document = json.loads(train_tokenizer(model_preset("tiny")).tokenizer_config)
    assert document["eos_token"] == "<｜end▁of▁sentence｜>"
    assert "auto_map" not in document
