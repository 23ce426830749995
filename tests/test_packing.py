import torch
from hypothesis import given
from hypothesis import strategies as st

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
    responses = [ids for _, ids in rollout.sequences()]
    assert torch.equal(packed.targets, torch.cat([responses[0], responses[1], responses[3]]))
    everything = torch.cat(responses)
    assert torch.equal(everything[packed.index], packed.targets)
    assert packed.boundaries.tolist() == [0, 7, 7 + 5, 7 + 5 + 8]
    for start, end in packed.boundaries.unfold(0, 2, 1).tolist():
        assert packed.position_ids[0, start:end].tolist() == list(range(end - start))


def test_a_prompt_of_one_token_without_a_response_packs():
    rollout = random_rollout([0, 2], prompt=1)
    packed = pack(rollout, [0, 1])
    assert packed.input_ids.shape[1] == 0 + 3


def test_lengths_are_masks_even_if_padding_is_the_end_token():
    rollout = random_rollout([2, 5])
    rollout.token_ids[:] = 0  # every token is the end-of-sequence token
    assert len(pack(rollout, [0]).targets) == 2
    assert len(pack(rollout, [1]).targets) == 5
