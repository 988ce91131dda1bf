"""Hostile and damaged headers: each is one `CheckpointError`, whatever the bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engram_trt.configs import safetensors_header
from engram_trt.configs.errors import CheckpointError
from engram_trt.configs.safetensors_header import parse_header, read_header

PATH = Path("shard.safetensors")
A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA_BYTES = 32


def text_of(header: object) -> bytes:
    return json.dumps(header).encode()


def parse(header: object, data_bytes: int = DATA_BYTES) -> Any:
    text = header if isinstance(header, bytes) else text_of(header)
    return parse_header(PATH, text, 8 + len(text) + data_bytes)


def write(path: Path, header: object, data_bytes: int = DATA_BYTES) -> Path:
    text = header if isinstance(header, bytes) else text_of(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1" * data_bytes)
    return path


def test_a_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    values = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(5, dtype=np.int8)}
    path = tmp_path / "m.safetensors"
    save_file(values, path, metadata={"format": "np"})
    header = read_header(path)
    assert header.metadata == {"format": "np"}
    assert header.file_bytes == path.stat().st_size
    content = path.read_bytes()
    for name, value in values.items():
        entry = header.entries[name]
        assert entry.shape == value.shape
        assert content[entry.offset : entry.offset + entry.nbytes] == value.tobytes()
    assert header.entries["x"].dtype == "F32"


def test_entries_come_in_the_order_of_their_data() -> None:
    assert list(parse({"b": B, "a": A}).entries) == ["a", "b"]


REJECTED: list[tuple[str, object, int]] = [
    ("overlap", {"a": A, "b": {**B, "data_offsets": [20, 28]}}, 28),
    ("the same bytes twice", {"a": A, "b": {**A}}, 24),
    ("gap", {"a": A, "b": {**B, "data_offsets": [26, 34]}}, 34),
    ("gap at the start", {"b": B}, 32),
    ("trailing bytes", {"a": A, "b": B}, 33),
    ("size and shape differ", {"a": {**A, "shape": [2, 4]}}, 24),
    ("reversed offsets", {"a": {**A, "data_offsets": [24, 0]}}, 24),
    ("negative offset", {"a": {**A, "data_offsets": [-24, 0]}}, 24),
    ("three offsets", {"a": {**A, "data_offsets": [0, 24, 24]}}, 24),
    ("float offset", {"a": {**A, "data_offsets": [0, 24.0]}}, 24),
    ("boolean offset", {"a": {"dtype": "I8", "shape": [1], "data_offsets": [False, True]}}, 1),
    ("negative dimension", {"a": {**A, "shape": [-2, -3]}}, 24),
    ("wrapping product", {"a": {"dtype": "I8", "shape": [2**33, 2**31], "data_offsets": [0, 0]}}, 0),
    ("huge dimension", {"a": {"dtype": "I8", "shape": [2**60, 0], "data_offsets": [0, 0]}}, 0),
    ("huge offset", {"a": {"dtype": "I8", "shape": [1], "data_offsets": [2**64, 2**64 + 1]}}, 1),
    (
        "zero length",
        {"a": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}, "b": {**B, "data_offsets": [0, 8]}},
        8,
    ),
    ("rank", {"a": {"dtype": "I8", "shape": [1] * 9, "data_offsets": [0, 1]}}, 1),
    ("unknown dtype", {"a": {**A, "dtype": "F4"}}, 24),
    ("dtype of another type", {"a": {**A, "dtype": ["F32"]}}, 24),
    ("missing field", {"a": {"dtype": "F32", "shape": [6]}}, 24),
    ("extra field", {"a": {**A, "file": "/etc/passwd"}}, 24),
    ("entry that is a list", {"a": [1]}, 0),
    ("empty name", {"": A}, 24),
    ("metadata of numbers", {"__metadata__": {"a": 1}, "a": A}, 24),
    ("metadata that is a list", {"__metadata__": [], "a": A}, 24),
    ("not an object", [A], 24),
    ("no JSON", b'{"a":', 24),
    ("no UTF-8", b'{"\xff": {}}', 0),
    ("duplicate tensor", b'{"a": %s, "a": %s}' % (text_of(A), text_of(A)), 24),
    ("duplicate field", b'{"a": {"dtype":"F32","shape":[6],"shape":[2,3],"data_offsets":[0,24]}}', 24),
    ("NaN", b'{"a": NaN}', 0),
    ("deep nesting", b'{"a":' * 20000 + b"1" + b"}" * 20000, 0),
    ("long integer", b'{"a": {"dtype":"I8","shape":[%s],"data_offsets":[0,1]}}' % (b"9" * 5000), 1),
]


@pytest.mark.parametrize(("header", "data_bytes"), [case[1:] for case in REJECTED], ids=[c[0] for c in REJECTED])
def test_a_bad_header_is_refused(header: object, data_bytes: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(header, data_bytes)
    assert PATH.name in caught.value.where


def test_a_truncated_file_names_sizes_and_the_first_lost_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "s.safetensors", {"a": A, "b": B}, data_bytes=27)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    assert f"{path.stat().st_size:,} bytes" in caught.value.found
    assert "b is the first tensor past the end" in caught.value.found
    assert caught.value.expected == f"{path.stat().st_size + 5:,} bytes"


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\0" * 8, (2**63).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"s\.safetensors"):
        read_header(path)


def test_an_oversized_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    length = safetensors_header.MAX_HEADER_BYTES + 1
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length + 100)
    with pytest.raises(CheckpointError, match="at most"):
        read_header(path)


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_ENTRIES", 1)
    with pytest.raises(CheckpointError, match="2 tensors"):
        parse({"a": A, "b": B})


def test_a_pipe_or_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            read_header(path)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_random_bytes_never_crash(text: bytes, data_bytes: int) -> None:
    try:
        header = parse(text, data_bytes)
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in header.entries.values()) == data_bytes


numbers = st.integers(-3, 40) | st.integers() | st.floats() | st.booleans() | st.none()
fields = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E8M0", "F4", 3, None]),
        "shape": st.lists(numbers, max_size=4),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=4), fields | st.just(A) | st.just(B), max_size=4), st.integers(0, 64))
def test_mutated_entries_never_crash_nor_reach_outside(header: dict[str, Any], data_bytes: int) -> None:
    try:
        parsed = parse(header, data_bytes)
    except CheckpointError:
        return
    start = parsed.file_bytes - data_bytes
    for entry in parsed.entries.values():
        assert start <= entry.offset <= entry.offset + entry.nbytes <= parsed.file_bytes


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(-40, 40))
def test_flipped_bytes_and_moved_ends_never_crash(position: int, value: int, moved: int) -> None:
    text = bytearray(text_of({"a": A, "b": B}))
    text[position % len(text)] = value
    try:
        parsed = parse(bytes(text), max(DATA_BYTES + moved, 0))
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in parsed.entries.values()) == max(DATA_BYTES + moved, 0)
