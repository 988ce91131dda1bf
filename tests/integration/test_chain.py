"""The exported chain under ONNX Runtime against the eager modules, on the `tiny` model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engram_trt.configs.tensors import TensorSpec
from engram_trt.export.demo_command import PROMPT_FILE
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.stage_runners.contract import NUMPY_DTYPES
from engram_trt.runtime.step_inputs import RowInput

NOISE = 1e-3
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompt(artifact: Artifact) -> npt.NDArray[np.int64]:
    """A text that exceeds window, top-k and candidate population."""
    ids = np.array(artifact.tokenizer().encode(PROMPT_FILE.read_text(encoding="utf-8")))
    config = artifact.config
    assert len(ids) >= 512 > config.window_size
    assert len(ids) // 2 > config.index_topk
    assert len(ids) > config.candidate_topk_blocks * config.candidate_block_size
    return ids


def poison(session: Session) -> None:
    for buffer in session.buffers.state_buffers().values():
        buffer.storage.fill(np.nan)  # type: ignore[attr-defined]


def test_prompt_and_decode_agree_with_eager(exported: Engine, eager: Engine, prompt: npt.NDArray[np.int64]) -> None:
    sessions = Session(exported), Session(eager)
    poison(sessions[0])
    rows = [session.add() for session in sessions]
    ours, theirs = (session.prefill(row, prompt[:540], "all") for session, row in zip(sessions, rows, strict=True))
    np.testing.assert_allclose(ours, theirs, atol=NOISE)
    for token in prompt[540:550]:
        ours, theirs = (session.step({row: [token]})[row] for session, row in zip(sessions, rows, strict=True))
        np.testing.assert_allclose(ours, theirs, atol=NOISE)
    assert 1 <= float(theirs.std()) <= 4


@pytest.mark.parametrize("sizes", [(1,), (2, 1, 5), (17, 3), (128,), (15, 16, 17)])
def test_chunks(exported: Engine, prompt: npt.NDArray[np.int64], sizes: tuple[int, ...]) -> None:
    """Sizes around the window of 16, pairs, and the limit of 128."""
    ids, whole = prompt[:200], Session(exported)
    expected = whole.prefill(whole.add(), ids, "all")
    session = Session(exported)
    poison(session)
    row, parts, start = session.add(), [], 0
    while start < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(session.step({row: ids[start : start + size]}, "all")[row])
        start += size
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=NOISE)


def test_rows_of_different_lengths(exported: Engine, prompt: npt.NDArray[np.int64]) -> None:
    texts = [prompt[:150], prompt[200:260], prompt[300:301]]
    session = Session(exported)
    poison(session)
    rows = [session.add() for _ in texts]
    together = {}
    for start in range(0, 150, 30):
        step = {row: ids[start : start + 30] for row, ids in zip(rows, texts, strict=True) if len(ids) > start}
        together |= session.step(step)
    for row, ids in zip(rows, texts, strict=True):
        alone = Session(exported)
        np.testing.assert_allclose(together[row], alone.prefill(alone.add(), ids), atol=NOISE)


def test_image_span_at_a_chunk_border(exported: Engine, eager: Engine, prompt: npt.NDArray[np.int64]) -> None:
    random = np.random.default_rng(1)
    mask = np.zeros(60, dtype=np.bool_)
    mask[20:33] = True
    rows = random.standard_normal((60, exported.config.dim)).astype(np.float32)
    row_input = RowInput(token_ids=prompt[:60], image_mask=mask, image_embeddings=rows)
    expected = Session(eager)
    reference = expected.step({expected.add(): row_input}, "all")[0]
    session = Session(exported)
    row = session.add()
    parts = [session.step({row: row_input.slice(a, b)}, "all")[row] for a, b in ((0, 25), (25, 26), (26, 60))]
    np.testing.assert_allclose(np.concatenate(parts), reference, atol=NOISE)


def test_taps(exported: Engine, eager: Engine, prompt: npt.NDArray[np.int64]) -> None:
    sessions = Session(exported), Session(eager)
    for session in sessions:
        session.step({session.add(): prompt[:40]})
    targets = len(exported.config.dspark_target_layer_ids)
    assert sessions[0].taps[0].shape == (40, targets * exported.config.dim)
    np.testing.assert_allclose(sessions[0].taps[0], sessions[1].taps[0], atol=NOISE)


def test_rollback(exported: Engine, prompt: npt.NDArray[np.int64]) -> None:
    straight = Session(exported)
    row = straight.add()
    straight.prefill(row, prompt[:101])
    expected = straight.step({row: prompt[101:104]})[row]
    session = Session(exported)
    row = session.add()
    session.prefill(row, prompt[:101])
    session.step({row: [7, 8, 9, 10, 11]})
    session.rollback(row, 5)
    np.testing.assert_array_equal(session.step({row: prompt[101:104]})[row], expected)


def test_hash_ids_are_the_same_for_any_chunks(exported: Engine, prompt: npt.NDArray[np.int64]) -> None:
    def ids_of(sizes: list[int]) -> list[npt.NDArray[np.int64]]:
        session = Session(exported)
        row, start, parts = session.add(), 0, []
        for size in sizes:
            session.step({row: prompt[start : start + size]})
            chain_now = next(reversed(session._chains.values()))
            parts.append(
                np.stack([chain_now.outputs[f"layers.{layer}.engram_ids"].read()[0].copy() for layer in (1, 4)], 1)
            )
            start += size
        return parts

    whole = np.concatenate(ids_of([60]))
    for sizes in ([1] * 60, [2, 1, 3] * 10, [59, 1]):
        np.testing.assert_array_equal(np.concatenate(ids_of(sizes)), whole)


def test_states_are_updated_in_place(artifact: Artifact, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime says at warning level when it copies a cache instead of writing into it."""
    from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

    files = {record.spec.name: artifact.root / record.onnx.path for record in artifact.manifest.stages}
    backend = OnnxRuntimeBackend(files, artifact.resident, log_severity_level=2)
    engine = Engine.load(artifact.config, artifact.manifest.deployment, artifact.stages, backend)
    unbound = {spec.name: _some_array(spec, engine) for spec in engine.stages[2].inputs}
    engine.runners[2].session.run(None, unbound)  # type: ignore[attr-defined]
    assert "in-place optimization not activated" in capfd.readouterr().err, "the warning this test looks for"
    session = Session(engine)
    poison(session)
    row = session.add()
    session.step({row: [5, 6, 7, 8, 9]})
    session.step({row: [5]})
    assert "in-place" not in capfd.readouterr().err
    for key, buffer in session.buffers.state_buffers().items():
        shape = session.buffers.specs[key].resolve(engine.symbol_limits)
        written = ~np.isnan(buffer.read(shape)[0]).any(axis=-1)
        entries = 3 if "entries_r2" in session.buffers.specs[key].shape else 6
        assert written[:entries].all(), key
        assert not written[entries:].any(), key


def _some_array(spec: TensorSpec, engine: Engine) -> npt.NDArray[np.generic]:
    sizes = {**engine.symbol_limits, "batch": 1, "tokens": 1, "table_rows": 2}
    return np.zeros(spec.resolve(sizes), dtype=NUMPY_DTYPES[spec.dtype])
