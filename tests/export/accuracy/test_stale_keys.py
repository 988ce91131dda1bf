"""The published code's stale index keys, against the vectors it produced, and that nothing else has them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_model import small_engine

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.golden_folder import GoldenFolder
from engram_trt.export.accuracy.golden_model import GoldenModel, open_session
from engram_trt.export.accuracy.golden_steps import run_span, start_rows
from engram_trt.export.accuracy.golden_tolerance import LOGITS
from engram_trt.export.accuracy.stale_keys import stale_index_keys
from engram_trt.runtime.session import Session

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
FILE = "model/full12/f32.decode_asis.safetensors"
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / FILE)


def decoded(stale: bool) -> dict[str, torch.Tensor]:
    """The model's decode steps behind its prompt, joined as in the files."""
    model = GoldenModel.open(GoldenFolder.open(GOLDEN), "full12", "f32")
    session = open_session(model.engine("torch", GOLDEN, lambda text: None))
    start_rows(session, model)
    with stale_index_keys(session.engine) if stale else nullcontext():
        run_span(session, model, 0, [model.prefill_len])
        return run_span(session, model, model.prefill_len, [1] * (model.length - model.prefill_len)).joined()


def test_decode_as_published_agrees_with_its_vectors(vectors: dict[str, torch.Tensor]) -> None:
    found = decoded(stale=True)
    torch.testing.assert_close(found["logits"], vectors["logits"], atol=LOGITS.atol, rtol=0)
    for layer in (2, 4, 6, 8, 10):
        want = vectors[f"layers.{layer}.topk"]
        got = found[f"layers.{layer}.topk"][..., : want.shape[-1]]
        for left, right in zip(got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1]), strict=True):
            assert set(left.tolist()) - {-1} == set(right.tolist()) - {-1}, layer


def test_without_the_switch_those_vectors_are_missed(vectors: dict[str, torch.Tensor]) -> None:
    assert (decoded(stale=False)["logits"] - vectors["logits"]).abs().max() > 0.1


def logits(length: int, stale: bool) -> list[np.ndarray]:
    engine = small_engine()
    session = Session(engine)
    row = session.add()
    ids = [5 + (7 * index) % 80 for index in range(40)]
    session.prefill(row, ids[:length])

    def decode() -> list[np.ndarray]:
        return [session.step({row: [token]})[row] for token in ids[length : length + 3]]

    if not stale:
        return decode()
    with stale_index_keys(engine):
        return decode()


def test_nothing_changes_while_every_entry_is_selected() -> None:
    """Up to four pairs with a top-k of four; the keys of a step before the switch are the layer's own."""
    for own, stale in zip(logits(4, False), logits(4, True), strict=True):
        np.testing.assert_array_equal(own, stale)


def test_the_hooks_are_gone_afterwards() -> None:
    engine = small_engine()
    with stale_index_keys(engine):
        pass
    hooks = [part._forward_pre_hooks for runner in engine.runners for part in runner.module.modules()]  # type: ignore[attr-defined]
    assert not any(hooks)


def test_other_back_ends_do_not_have_it(tiny_artifact: Path) -> None:
    from engram_trt.runtime.artifact import Artifact

    with Artifact.open(tiny_artifact).engine("onnxruntime") as engine:
        with pytest.raises(RequestError, match="no other back end"), stale_index_keys(engine):
            pass
