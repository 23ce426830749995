import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.attention import lanes
from dclightning.packing import micro_batches, pack
from tests.helpers import random_rollout

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(lengths=lengths, budget=st.integers(1, 200), count=st.integers(1, 8))
def test_each_sequence_is_in_one_micro_batch_within_the_budget(lengths, budget, count):
    batches = micro_batches(lengths, budget, count)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(batches) >= count
    assert sum(not batch for batch in batches) == max(0, count - len(lengths))
    for batch in filter(None, batches):
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1


@given(lengths=lengths, count=st.integers(1, 30))
def test_ranks_can_agree_on_a_number(lengths, count):
    if count <= len(lengths):
        batches = micro_batches(lengths, 10**6, count)
        assert len(batches) == count
        assert all(batches)


def test_pack_points_at_the_right_tokens():
    rollout = random_rollout([3, 0, 1, 4])
    packed = pack(rollout, [0, 1, 3])
    sequences = rollout.sequences()
    responses = [ids for _, ids in sequences]
    assert torch.equal(packed.targets, torch.cat([responses[3], responses[0], responses[1]]))  # longest first
    assert torch.equal(torch.cat(responses)[packed.index], packed.targets)
    assert torch.equal(packed.input_ids[0], torch.cat([torch.cat(sequences[i])[:-1] for i in (3, 0, 1)]))
    assert packed.position_ids[0].tolist() == [*range(8), *range(7), *range(5)]


@given(lengths=lengths)
def test_lanes_hold_each_sequence_whole_and_waste_at_most_half(lengths):
    lengths = sorted(lengths, reverse=True)
    row = torch.arange(sum(lengths))
    picked, held = [], []
    for group in lanes(lengths, torch.device("cpu")):
        picked.append(row[group.lay].flatten()[group.pick])
        held.extend(group.lay[:, 0].tolist())
        assert group.lay.numel() <= 2 * len(group.pick)
    assert torch.equal(torch.cat(picked), row)
    assert held == [sum(lengths[:i]) for i in range(len(lengths))]


def test_a_prompt_of_one_token_without_a_response_packs():
    rollout = random_rollout([0, 2], prompt=1)
    packed = pack(rollout, [0, 1])
    assert packed.input_ids.shape[1] == 0 + 3


def test_lengths_are_masks_even_if_padding_is_the_end_token():
    rollout = random_rollout([2, 5])
    rollout.token_ids[:] = 0  # every token is the end-of-sequence token
    assert len(pack(rollout, [0]).targets) == 2
    assert len(pack(rollout, [1]).targets) == 5
