"""Readers of untrusted files over a corpus and its mutations: a clean answer or one error, whatever the bytes.

`tests/data/corpus/<reader>/` holds good files and files with one fault each; the names say which.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_trt.configs.artifact import Manifest, document_digest
from engram_trt.configs.checkpoint_files import INDEX_NAME, read_index
from engram_trt.configs.errors import ArtifactError, CheckpointError
from engram_trt.configs.json_file import parse_json_object
from engram_trt.configs.onnx_external_data import MalformedError, check_external_data, external_tensors
from engram_trt.configs.safetensors_header import parse_header

CORPUS = Path(__file__).parents[1] / "data" / "corpus"
DATA_BYTES = 32
"""What the headers and models of the corpus refer to."""


def parse_as_header(content: bytes, folder: Path) -> None:
    header = parse_header(folder / "s.safetensors", content, 8 + len(content) + DATA_BYTES)
    assert sum(entry.nbytes for entry in header.entries.values()) == DATA_BYTES
    for entry in header.entries.values():
        assert 8 + len(content) <= entry.offset < entry.offset + entry.nbytes <= header.file_bytes


def parse_as_index(content: bytes, folder: Path) -> None:
    (folder / INDEX_NAME).write_bytes(content)
    index = read_index(folder)
    for shard in index.weight_map.values():
        assert Path(folder / shard).parent == folder


def parse_as_manifest(content: bytes, folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = Manifest.parse(parse_json_object(content, str(path), ArtifactError), path)
    assert Manifest.parse(manifest.to_json(), path) == manifest


def parse_as_onnx(content: bytes, folder: Path) -> None:
    (folder / "m.onnx").write_bytes(content)
    (folder / "m.data").write_bytes(b"\0" * DATA_BYTES)
    for tensor in check_external_data(folder / "m.onnx", folder / "m.data"):
        assert tensor.location == "m.data"
        assert 0 <= tensor.offset <= tensor.offset + tensor.length <= DATA_BYTES


READERS: dict[str, Callable[[bytes, Path], None]] = {
    "header": parse_as_header,
    "index": parse_as_index,
    "manifest": parse_as_manifest,
    "onnx": parse_as_onnx,
}
FILES = sorted(path for reader in READERS for path in (CORPUS / reader).iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_corpus(path: Path, tmp_path: Path) -> None:
    reader = READERS[path.parent.name]
    if path.stem.startswith("good"):
        reader(path.read_bytes(), tmp_path)
        return
    with pytest.raises((CheckpointError, ArtifactError)) as caught:
        reader(path.read_bytes(), tmp_path)
    for part in (caught.value.where, caught.value.found, caught.value.expected, caught.value.remedy):
        assert part


mutations = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "cut", "put", "twice"]), st.binary(max_size=6)
    ),
    min_size=1,
    max_size=4,
)


def mutated(content: bytes, steps: list[tuple[float, str, bytes]]) -> bytes:
    for place, what, data in steps:
        position = int(place * max(len(content), 1))
        head, tail = content[:position], content[position:]
        if what == "cut":
            content = head + tail[len(data) + 1 :]
        elif what == "put":
            content = head + data + tail
        elif what == "twice":
            content = head + tail[:40] + tail
        else:
            content = head + data + tail[len(data) :]
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(FILES), mutations)
def test_mutations_of_the_corpus(folder: Path, path: Path, steps: list[tuple[float, str, bytes]]) -> None:
    try:
        READERS[path.parent.name](mutated(path.read_bytes(), steps), folder)
    except (CheckpointError, ArtifactError):
        return


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GOOD = json.loads((CORPUS / "manifest" / "good.json").read_text())


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in inner for found in places(item, (*path, key))]


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([place for place in places(GOOD) if place != ("digest",)]), anything, st.booleans())
def test_any_value_anywhere_in_a_manifest(folder: Path, place: tuple[Any, ...], value: Any, remove: bool) -> None:
    """With a digest that fits, so that the entries themselves are judged."""
    document = json.loads(json.dumps(GOOD))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    try:
        document["digest"] = document_digest({key: item for key, item in document.items() if key != "digest"})
    except ValueError:  # NaN: no JSON, which the file reader refuses before
        return
    try:
        parse_as_manifest(json.dumps(document).encode(), folder)
    except ArtifactError:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_model_that_points_anywhere(content: bytes) -> None:
    try:
        tensors = external_tensors(content)
    except MalformedError:
        return
    assert all(tensor.offset >= 0 and tensor.length >= 0 for tensor in tensors)
