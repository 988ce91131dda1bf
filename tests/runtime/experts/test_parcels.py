"""Every token's experts are asked where they are, and every answer finds its place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engram_trt.runtime.experts.parcels import expert_shares, pack_parcels, unpack_outputs


@given(num_experts=st.integers(1, 400), num_devices=st.integers(1, 9))
def test_shares_are_all_experts_once_and_even(num_experts: int, num_devices: int) -> None:
    shares = expert_shares(num_experts, num_devices)
    assert [expert for share in shares for expert in share] == list(range(num_experts))
    assert len(shares) == num_devices
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(data=st.data(), tokens=st.integers(1, 12), devices=st.integers(1, 4), seed=st.integers(0, 99))
def test_answers_come_back_to_the_token_and_slot_that_asked(
    data: st.DataObject, tokens: int, devices: int, seed: int
) -> None:
    num_experts = data.draw(st.integers(devices, 12))
    activated = data.draw(st.integers(1, num_experts))
    random = np.random.default_rng(seed)
    ids = np.array([sorted(random.permutation(num_experts)[:activated]) for _ in range(tokens)], dtype=np.int32)
    weights = random.random((tokens, activated), dtype=np.float32)
    ffn_in = np.arange(tokens * 3, dtype=np.float32).reshape(tokens, 3)
    shares = expert_shares(num_experts, devices)
    packed = pack_parcels(ffn_in, ids, weights, shares)
    answers = []
    for share, addressed in zip(shares, packed, strict=True):
        parcel = addressed.parcel
        assert parcel.num_tokens == sum(any(expert in share for expert in row) for row in ids.tolist())
        # A device answers with what says who was asked by whom: the expert's own number, the token's first feature.
        answer = [
            [share.start + local, parcel.ffn_in[row, 0], parcel.expert_weights[row, slot]]
            for row, chosen in enumerate(parcel.expert_ids.tolist())
            for slot, local in enumerate(chosen)
            if local >= 0
        ]
        assert len(answer) == parcel.num_outputs
        answers.append(np.array(answer, dtype=np.float32).reshape(-1, 3))
    target = np.full((tokens, activated, 3), np.nan, dtype=np.float32)
    unpack_outputs(packed, answers, target)
    np.testing.assert_array_equal(target[:, :, 0], ids)
    np.testing.assert_array_equal(target[:, :, 1], np.repeat(ffn_in[:, :1], activated, axis=1))
    np.testing.assert_array_equal(target[:, :, 2], weights)
