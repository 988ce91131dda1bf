"""Rows of image spans, and cutting inputs."""

from __future__ import annotations

import numpy as np
import pytest

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.step_inputs import RowInput, image_rows

START, NEWLINE, END = (np.full(4, value, dtype=np.float32) for value in (1.0, 2.0, 3.0))


def test_image_rows_follow_the_types() -> None:
    """One image of 2 x 2: start, two rows of two tokens and a newline each, end."""
    types = np.array([-1, 0, 1, 1, 2, 1, 1, 2, 3, -1])
    features = [np.arange(16, dtype=np.float32).reshape(4, 4) + 10]
    rows = image_rows(types, features, START, NEWLINE, END)
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 10, 14, 2, 18, 22, 2, 3, 0])


def test_image_rows_count_the_features() -> None:
    with pytest.raises(RequestError, match="found 1 rows; expected 2"):
        image_rows(np.array([0, 1, 1, 3]), [np.zeros((1, 4), dtype=np.float32)], START, NEWLINE, END)


def test_slice_cuts_everything_alike() -> None:
    row_input = RowInput(
        token_ids=np.arange(6), image_mask=np.arange(6) % 2 == 0, image_embeddings=np.ones((6, 2), dtype=np.float32)
    )
    part = row_input.slice(2, 5)
    assert part.token_ids.tolist() == [2, 3, 4]
    assert part.image_mask is not None
    assert part.image_mask.tolist() == [True, False, True]
    assert part.image_embeddings is not None
    assert part.image_embeddings.shape == (3, 2)
