"""Random weights: moments, formats, determinism, bounded pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
from engram_trt.configs.preset_files import model_preset
from engram_trt.export import synth_weights
from engram_trt.export.synth_weights import mean_and_std, tensor_pieces

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def draw(
    name: str, shape: TensorShape, scale: TensorShape | None, *, is_table: bool = False, seed: int = 1
) -> dict[str, bytes]:
    """All pieces put together, by name."""
    buffers: dict[str, bytearray] = {}
    for piece, offset, data in tensor_pieces(name, shape, scale, seed, is_table=is_table):
        assert data.dtype == np.uint8
        assert data.size <= 4 * (1 << 22)
        buffer = buffers.setdefault(piece, bytearray())
        buffer.extend(b"\0" * max(offset + data.size - len(buffer), 0))
        buffer[offset : offset + data.size] = data.tobytes()
    return {piece: bytes(buffer) for piece, buffer in buffers.items()}


def fp4(rows: int, columns: int) -> tuple[TensorShape, TensorShape]:
    return (
        TensorShape(dtype="I8", shape=(rows, columns // 2)),
        TensorShape(dtype="F8_E8M0", shape=(rows, columns // 32)),
    )


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (4096, 1024)])
def test_fp4_weights_have_the_deviation_of_their_width(rows: int, columns: int) -> None:
    """Both ways of making them, the drawn one and the one from a pool of groups."""
    name = "layers.0.ffn.experts.1.w1.weight"
    content = draw(name, *fp4(rows, columns))
    packed = np.frombuffer(content[name], dtype=np.uint8).reshape(rows, columns // 2)
    scales = np.frombuffer(content["layers.0.ffn.experts.1.w1.scale"], dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns // 32, 32)
    values = E2M1[codes] * 2.0 ** (scales.reshape(rows, -1, 1).astype(int) - 127)
    assert values.std() == pytest.approx(1 / math.sqrt(columns), rel=0.05)
    assert abs(values.mean()) < 0.1 / math.sqrt(columns)
    assert len(np.unique(values[:, 0, 0])) > 5
    # The rule: the largest magnitude of a group lies in the upper half of the codes' range.
    assert (np.abs(E2M1[codes]).max(axis=2) >= 3).all()


@pytest.mark.parametrize("rows", [100, 70_000])
def test_table_rows_are_scaled_by_themselves(rows: int) -> None:
    name = "layers.1.engram.embed.weight"
    shapes = TensorShape(dtype="F8_E4M3", shape=(rows, 64)), TensorShape(dtype="F8_E8M0", shape=(rows, 2))
    content = draw(name, *shapes, is_table=True)
    assert len(content[name]) == rows * 64
    assert len(content["layers.1.engram.embed.scale"]) == rows * 2
    magnitudes = np.frombuffer(content[name], dtype=np.uint8).reshape(rows, 2, 32) & 0x7F
    # 224 = 448 / 2 has code 0x76; no code is NaN (0x7f).
    assert (magnitudes.max(axis=2) >= 0x76).all()
    assert magnitudes.max() < 0x7F


def test_the_same_seed_and_name_give_the_same_bytes() -> None:
    shapes = fp4(64, 128)
    first = draw("layers.0.ffn.experts.1.w1.weight", *shapes)
    assert draw("layers.0.ffn.experts.1.w1.weight", *shapes) == first
    assert draw("layers.0.ffn.experts.1.w1.weight", *shapes, seed=2) != first
    other = draw("layers.0.ffn.experts.2.w1.weight", *shapes)
    assert [*other.values()] != [*first.values()]


def test_pieces_of_a_large_tensor_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth_weights, "_CHUNK_VALUES", 1024)
    shape = TensorShape(dtype="F8_E4M3", shape=(200, 64)), TensorShape(dtype="F8_E8M0", shape=(7, 2))
    pieces = list(tensor_pieces("layers.0.attn.wkv.weight", *shape, 1, is_table=False))
    assert max(data.size for _, _, data in pieces) <= 64 * 32
    content = draw("layers.0.attn.wkv.weight", *shape)
    assert {name: len(data) for name, data in content.items()} == {
        "layers.0.attn.wkv.weight": 200 * 64,
        "layers.0.attn.wkv.scale": 14,
    }


def test_moments_by_role() -> None:
    assert mean_and_std("layers.0.attn.kv_norm.weight", (64,)) == (1.0, 0.1)
    assert mean_and_std("vision.blocks.0.norm1.weight", (64,)) == (1.0, 0.1)
    assert mean_and_std("layers.0.ffn.gate.bias_vl", (8,)) == (0.0, 0.05)
    assert mean_and_std("embed.weight", (1024, 128)) == (0.0, 1.0)
    assert mean_and_std("head.weight", (1024, 100)) == (0.0, 0.2)
    assert mean_and_std("layers.0.hc_attn_fn", (24, 400)) == (0.0, 0.05)
    assert mean_and_std("vision.blocks.0.attn.wqkv.bias", (96,)) == (0.0, 0.02)


def test_every_tensor_of_a_model_is_drawn_with_a_sensible_deviation() -> None:
    for name, shape in checkpoint_tensors(model_preset("tiny")).items():
        mean, std = mean_and_std(name, shape.shape)
        assert mean in (0.0, 1.0)
        assert 0 < std <= 1
