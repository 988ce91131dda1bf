"""The encoders against torch's casts, a brute-force nearest code, and the golden quantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engram_trt.export.synth_formats import (
    e2m1_codes,
    e4m3_codes,
    quantize_fp4_rows,
    quantize_fp8_rows,
    quantize_fp8_tiles,
    scale_values,
    to_bf16,
    to_f32,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "ops"
FP4_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def spread(largest: float, seed: int) -> np.ndarray:
    """Values of all magnitudes up to `largest`, of both signs, with every tie of the narrow formats."""
    generator = np.random.default_rng(seed)
    random = generator.standard_normal(20_000) * 2.0 ** generator.integers(-14, 9, 20_000)
    ties = np.concatenate([np.arange(-4096, 4096) / 2.0**shift for shift in (3, 6, 10, 12)])
    return np.clip(np.concatenate([random, ties, [0.0, -0.0]]), -largest, largest).astype(np.float32)


def test_bf16_and_f32_bytes_are_torchs() -> None:
    values = spread(3e38, 1)
    tensor = torch.from_numpy(values)
    assert to_bf16(values).tobytes() == tensor.bfloat16().view(torch.uint8).numpy().tobytes()
    assert to_f32(values).tobytes() == values.tobytes()


def test_e4m3_codes_are_torchs() -> None:
    values = spread(448.0, 2)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3_codes(values), expected)


def test_e2m1_codes_are_the_nearest_with_ties_to_even() -> None:
    values = spread(9.0, 3)
    for value, code in zip(values.tolist(), e2m1_codes(values).tolist(), strict=True):
        distances = [abs(abs(value) - known) for known in FP4_VALUES]
        nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
        assert code & 7 == (nearest[0] if len(nearest) == 1 else next(n for n in nearest if n % 2 == 0))
        assert (code >> 3 == 1) == bool(np.signbit(value))


def test_ties_named_by_the_format() -> None:
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    assert [FP4_VALUES[code] for code in e2m1_codes(values)] == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (40, 64), (33, 96), (64, 31)])
def test_tiles_are_scaled_by_the_smallest_power_of_two_that_fits(rows: int, columns: int) -> None:
    values = np.random.default_rng(4).standard_normal((rows, columns)).astype(np.float32)
    codes, scales = quantize_fp8_tiles(values)
    assert codes.shape == values.shape
    assert scales.shape == (-(-rows // 32), -(-columns // 32))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            tile = (slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32))
            scale = 2.0 ** (int(scales[row, column]) - 127)
            amax = np.abs(values[tile]).max()
            assert amax / scale <= 448 < amax / (scale / 2)
            expected = torch.from_numpy(values[tile] / np.float32(scale)).to(torch.float8_e4m3fn)
            np.testing.assert_array_equal(codes[tile], expected.view(torch.uint8).numpy())


def test_rows_are_scaled_by_groups_of_32() -> None:
    values = np.random.default_rng(5).standard_normal((7, 96)).astype(np.float32) * 5
    codes, scales = quantize_fp8_rows(values)
    packed, fp4_scales = quantize_fp4_rows(values)
    assert scales.shape == fp4_scales.shape == (7, 3)
    assert packed.shape == (7, 48)
    for row in range(7):
        for group in range(3):
            part = values[row, 32 * group : 32 * group + 32]
            for scale_byte, largest in ((scales[row, group], 448), (fp4_scales[row, group], 6)):
                scale = 2.0 ** (int(scale_byte) - 127)
                assert np.abs(part).max() / scale <= largest < np.abs(part).max() / (scale / 2)
    decoded = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    restored = decoded * np.repeat(scale_values(scales), 32, axis=1)
    np.testing.assert_allclose(restored, values, rtol=2**-4, atol=2**-5)


def test_the_low_nibble_is_the_even_column() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :4] = [6.0, -6.0, 1.0, 0.0]
    codes, scales = quantize_fp4_rows(values)
    assert scales.tolist() == [[127]]
    assert codes[0, :2].tolist() == [0x7 | 0xF << 4, 0x2]


def test_zeros_have_a_finite_scale() -> None:
    zeros = np.zeros((32, 32), dtype=np.float32)
    for quantize in (quantize_fp8_tiles, quantize_fp8_rows, quantize_fp4_rows):
        codes, scales = quantize(zeros)
        assert not codes.any()
        assert (scales > 0).all()
        assert (scales < 255).all()


@pytest.mark.parametrize("case", ["c0", "c1", "c2"])
def test_golden_quantised_weights(case: str) -> None:
    golden = load_file(GOLDEN / "quant_linear.safetensors")
    weights = golden[f"{case}.w_src"].numpy()
    codes, scales = quantize_fp8_tiles(weights)
    np.testing.assert_array_equal(codes, golden[f"{case}.fp8.w"].view(torch.uint8).numpy())
    np.testing.assert_array_equal(scales, golden[f"{case}.fp8.scale"].numpy())
    packed, fp4_scales = quantize_fp4_rows(weights)
    np.testing.assert_array_equal(packed, golden[f"{case}.fp4.w_packed"].numpy())
    np.testing.assert_array_equal(fp4_scales, golden[f"{case}.fp4.scale"].numpy())
