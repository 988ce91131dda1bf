"""What the random weights do: logits spread but finite, every expert used, every selection a real choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram_trt.configs.checkpoint import Checkpoint
from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.limits import Limits
from engram_trt.configs.preset_files import model_preset
from engram_trt.export.checkpoint_source import CheckpointSource
from engram_trt.export.modeling.probe import Recorder
from engram_trt.export.synth import SynthRequest, synthesize
from engram_trt.export.torch_runner import TorchBackend, torch_engine
from engram_trt.runtime.session import Session
from engram_trt.runtime.token_map import TokenMap
from engram_trt.runtime.tokenizer import Tokenizer

TEXT = Path(__file__).parents[2] / "export" / "data" / "tiny_corpus.txt"
NUM_TOKENS = 520


@pytest.mark.parametrize("seed", [0, 7])
def test_tiny_models_of_any_seed_make_varied_choices(tmp_path: Path, seed: int) -> None:
    synthesize(SynthRequest(config=model_preset("tiny"), out=tmp_path / "tiny", seed=seed))
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    config = checkpoint.config
    tokenizer = Tokenizer.open(checkpoint.tokenizer_path, config)
    token_map = torch.from_numpy(TokenMap.for_model(tokenizer, config).ids.copy())
    limits = Limits(max_batch=1, max_step_tokens=NUM_TOKENS, max_context=NUM_TOKENS)
    engine = torch_engine(CheckpointSource(checkpoint=checkpoint), DeploymentConfig(limits=limits), token_map)
    assert isinstance(engine.backend, TorchBackend)
    engine.backend.recorder = recorder = Recorder()
    session = Session(engine)
    row = session.add()
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
    logits = session.step({row: ids}, "all")[row]

    assert logits.shape == (NUM_TOKENS, config.vocab_size)
    assert np.isfinite(logits).all()
    deviations = logits.std(axis=1)
    assert deviations.min() > 1
    assert deviations.max() < 4
    assert len(np.unique(logits.argmax(axis=1))) > NUM_TOKENS // 4

    probed = recorder.values
    for layer in config.layers:
        chosen = probed[f"layers.{layer.layer_id}.gate_idx"].flatten().long()
        share = torch.bincount(chosen, minlength=config.n_routed_experts) / chosen.numel()
        assert share.min() > 0.2 / config.n_routed_experts, layer
        if layer.is_index_source:
            selected = probed[f"layers.{layer.layer_id}.topk"][0, -1]
            entries = NUM_TOKENS // layer.compress_ratio
            assert (selected >= 0).sum() == config.index_topk
            newest = set(range(entries - config.index_topk, entries))
            assert set(selected.tolist()) != newest, "the selection is only the newest entries"
    writes = [probed[f"layers.{layer_id}.engram_out"] for layer_id in config.engram_layer_ids]
    assert all(write.std() > 0.1 for write in writes)
