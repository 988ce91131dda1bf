"""Whole chains over every residency: the same bits, counted per step, and a failed fetch undoes the step."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import CheckpointError, DeploymentError, TokenizerError
from engram_trt.configs.preset_files import model_preset
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram import staging
from engram_trt.runtime.engram.packing import pack_table
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

LAYERS = (1, 4)
COLUMNS = 12
PLACEMENTS: list[dict[str, Any]] = [
    {"residency": "mmap"},
    {"residency": "packed", "cache_mib": 0},
    {"residency": "host", "share_host": False},
    {"residency": "device", "num_shards": 5},
    {"residency": "mmap", "layers": ((4, "host"),), "share_host": False},
]


def run(engine: Engine) -> npt.NDArray[np.float32]:
    """Logits of two rows: chunks of a prompt with an image span, a rollback, and decode steps."""
    session = Session(engine)
    first, second = session.add(), session.add()
    random = np.random.default_rng(0)
    prompt = random.integers(5, 800, 20)
    parts = [session.prefill(first, prompt[:5], "all"), session.prefill(first, prompt[5:], "all")]
    session.rollback(first, 3)
    for token in random.integers(5, 800, 2):
        results = session.step({first: [int(token)], second: [int(token) + 1, 9]}, "all")
        parts += [results[first], results[second]]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Path) -> Artifact:
    return Artifact.open(tiny_artifact)


@pytest.fixture(scope="module")
def packed_folder(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packed")
    for layer_id in LAYERS:
        pack_table(artifact.checkpoint, layer_id, folder)
    return str(folder)


def test_logits_are_the_same_bits_wherever_the_tables_live(artifact: Artifact, packed_folder: str) -> None:
    with artifact.engine() as engine:
        expected = run(engine)
    for choices in PLACEMENTS:
        with artifact.engine(engram=EngramPlacement(packed_folder=packed_folder, **choices)) as engine:
            assert np.array_equal(run(engine), expected), choices


def test_another_back_end_takes_fetched_rows_as_well(artifact: Artifact) -> None:
    """The eager modules hold their own tables by default; steps of theirs are slow, so this is one."""
    logits = []
    for placement in (EngramPlacement(), EngramPlacement(residency="mmap")):
        with artifact.engine("torch", placement) as engine:
            session = Session(engine)
            logits.append(session.prefill(session.add(), [5, 6, 7, 8]))
            assert (session.engram is not None) == (placement.residency == "mmap")
    assert np.array_equal(*logits)


def test_a_step_says_what_it_fetched(artifact: Artifact) -> None:
    with artifact.engine(engram=EngramPlacement(residency="mmap")) as engine:
        session = Session(engine)
        row = session.add()
        assert session.engram is not None
        session.prefill(row, [5, 6, 7])
        counters = session.engram.counters
        assert sorted(counters) == list(LAYERS)
        assert [entry.rows for entry in counters.values()] == [3 * COLUMNS] * 2
        assert all(entry.num_bytes == entry.distinct_rows * 33 for entry in counters.values())
        session.rollback(row, 3)
        session.prefill(row, [5, 6, 7])
        again = session.engram.counters
        assert all(entry.hits == entry.distinct_rows and entry.num_bytes == 0 for entry in again.values())
        facts = session.engram.to_json()
        assert set(facts["total"]) == {"rows", "distinct_rows", "hits", "bytes", "wait_ms"}
        assert facts["layers"]["4"]["rows"] == 3 * COLUMNS
        assert set(session.stage_seconds) >= {"fetch", "block_01:wait", "block_04:wait"}


def test_small_tables_are_bound_whole_by_themselves(artifact: Artifact) -> None:
    with artifact.engine() as engine:
        session = Session(engine)
        session.prefill(session.add(), [5, 6])
        assert session.engram is None
        assert set(session.stage_seconds) == {spec.name for spec in engine.stages}


def test_lookups_of_all_layers_start_after_the_hash_and_late_rows_are_waited_for(artifact: Artifact) -> None:
    with artifact.engine(engram=EngramPlacement(residency="mmap", cache_mib=0)) as engine:
        store = engine.engram_store
        assert store is not None
        session = Session(engine)
        row = session.add()
        expected = session.prefill(row, [5, 6, 7, 8])
        session.reset()
        started, go_on = {layer_id: threading.Event() for layer_id in LAYERS}, threading.Event()

        def held_back(layer_id: int) -> None:
            gather = store.tables[layer_id].gather

            def late(*arguments: Any) -> None:
                started[layer_id].set()
                assert go_on.wait(60)
                gather(*arguments)

            store.tables[layer_id].gather = late  # type: ignore[method-assign]

        for layer_id in LAYERS:
            held_back(layer_id)
        session.add()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(session.prefill(row, [5, 6, 7, 8])))
        thread.start()
        assert all(event.wait(60) for event in started.values())  # layer 4's, while block 1 still waits
        assert "block_01" not in session.stage_seconds or thread.is_alive()
        go_on.set()
        thread.join(60)
        assert np.array_equal(answers[0], expected)
        assert session.engram is not None
        assert session.engram.counters[1].wait_ms > 0


def test_rows_go_into_the_memory_of_a_buffer_where_the_host_can_write_to_it() -> None:
    backend = OnnxRuntimeBackend({}, lambda spec, binding: np.zeros(0, dtype=np.int8))
    buffer = backend.allocate("int8", 64)
    memory = staging._memory(buffer, (2, 32))
    assert memory is not None
    memory[1, 3] = 200
    assert buffer.read((64,))[35] == 200 - 256
    read = buffer.read
    buffer.read = lambda shape: read(shape).copy()  # type: ignore[method-assign]
    assert staging._memory(buffer, (2, 32)) is None


def test_rows_are_copied_on_where_the_host_cannot(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = []
    for _ in range(2):
        with artifact.engine(engram=EngramPlacement(residency="mmap")) as engine:
            session = Session(engine)
            logits.append(session.prefill(session.add(), [5, 6, 7, 8]))
        monkeypatch.setattr(staging, "_memory", lambda buffer, shape: None)
    assert np.array_equal(*logits)


@pytest.fixture
def own_artifact(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> Artifact:
    """A checkpoint that a test may damage."""
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    return Artifact.open(tiny_artifact, tmp_path / "checkpoint")


def test_a_failed_fetch_undoes_the_step_and_nothing_else(own_artifact: Artifact) -> None:
    with own_artifact.engine(engram=EngramPlacement(residency="mmap")) as engine:
        session = Session(engine)
        row = session.add()
        session.prefill(row, [5, 6, 7])
        rows, _ = (own_artifact.checkpoint.entry(f"layers.4.engram.embed.{name}") for name in ("weight", "scale"))
        aside = rows.shard.with_suffix(".aside")
        rows.shard.rename(aside)
        for _attempt in range(2):
            with pytest.raises(CheckpointError, match=rows.shard.name):
                session.step({row: [8]})
        assert session.length(row) == 3
        aside.rename(rows.shard)  # it was the same file all along
        after = session.step({row: [8]})[row]
        fresh = Session(engine)
        fresh.prefill(fresh.add(), [5, 6, 7])
        assert np.array_equal(fresh.step({0: [8]})[0], after)


def test_the_token_map_is_pinned_by_its_digest_not_its_size(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_trt.runtime import token_map

    build = token_map.TokenMap.build

    def other(tokenizer: Any) -> Any:
        found = build(tokenizer)
        ids = found.ids.copy()
        ids[[700, 701]] = ids[[701, 700]]
        assert (ids != found.ids).any()
        return token_map.TokenMap(ids=ids, num_classes=found.num_classes, digest="0" * 64)

    monkeypatch.setattr(token_map.TokenMap, "build", other)
    with pytest.raises(TokenizerError, match="the map it was exported with"):
        artifact.engine()


# --- the deployment file ----------------------------------------------------------------------------------------


def test_a_deployment_file_places_the_tables(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text('[engram]\nresidency = "mmap"\ncache_mib = 7\nlayers = { 4 = "host" }\nnum_threads = 3\n')
    deployment = DeploymentConfig.from_file(file)
    deployment.require_fits(model_preset("tiny"))
    assert (deployment.engram.of_layer(1), deployment.engram.of_layer(4)) == ("mmap", "host")
    assert (deployment.engram.cache_mib, deployment.engram.num_threads) == (7, 3)
    assert DeploymentConfig.from_dict(deployment.to_dict()) == deployment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('residency = "disk"', "engram.residency: found 'disk'"),
        ('layers = { 4 = "disk" }', "engram.layers.4: found 'disk'"),
        ('layers = { four = "mmap" }', "engram.layers.four: found 'four'; expected a layer id"),
        ('layers = "mmap"', "engram.layers: found 'mmap'; expected a table"),
        ('layers = { 3 = "mmap" }', "engram.layers: found .3.; expected Engram layers of the model, .1, 4."),
        ('residency = "packed"', "engram.packed_folder: found none"),
        ("num_threads = 0", "engram.num_threads: found 0; expected 1"),
        ("cache_mib = -1", "engram.cache_mib: found -1"),
        ('shard_by = "bytes"', "engram.shard_by: found 'bytes'"),
        ("residencies = 1", "engram.residencies: found an unknown key"),
        ('num_shards = "2"', "engram.num_shards: found '2'"),
    ],
)
def test_a_wrong_placement_is_named_by_its_key(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(f"[engram]\n{text}\n")
    with pytest.raises(DeploymentError, match=message):
        DeploymentConfig.from_file(file).require_fits(model_preset("tiny"))
