"""Choices compared as sets, and candidate blocks as masks over entries."""

from __future__ import annotations

import torch

from engram_trt.export.accuracy.golden_sets import as_sets, blocks_of_mask, mask_of_blocks, sorted_by_index


def test_order_and_padding_do_not_matter() -> None:
    first = as_sets(torch.tensor([[3, 0, -1, -1]]), 5)
    assert torch.equal(first, as_sets(torch.tensor([[0, 3]]), 5))
    assert first[0, :5].tolist() == [True, False, False, True, False]


def test_a_repeated_or_foreign_index_is_no_proper_set() -> None:
    proper = as_sets(torch.tensor([[0, 3, -1]]), 5)
    assert not torch.equal(as_sets(torch.tensor([[0, 3, 3]]), 5), proper)
    assert not torch.equal(as_sets(torch.tensor([[0, 3, 9]]), 5), proper)


def test_blocks_become_entries_cut_at_the_width() -> None:
    mask = mask_of_blocks(torch.tensor([[0, 2, -1]], dtype=torch.int32), 2, 5)
    assert mask.tolist() == [[True, True, False, False, True]]


def test_blocks_and_masks_are_inverse() -> None:
    blocks = torch.tensor([[[0, 2, -1]], [[1, -1, -1]]], dtype=torch.int32)
    assert torch.equal(blocks_of_mask(mask_of_blocks(blocks, 4, 11), 4, 3), blocks)
    assert torch.equal(blocks_of_mask(torch.ones(1, 5, dtype=torch.bool), 2, 5)[0], torch.tensor([0, 1, 2, -1, -1]))


def test_weights_move_with_their_indices() -> None:
    indices, weights = sorted_by_index(torch.tensor([[4, 1, 2]]), torch.tensor([[0.4, 0.1, 0.2]]))
    assert indices.tolist() == [[1, 2, 4]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.2, 0.4]]))
