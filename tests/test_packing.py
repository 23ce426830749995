from dataclasses import replace

import torch
from hypothesis import example, given
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
    sequences = rollout.sequences()
    responses = [ids for _, ids in sequences]
    assert torch.equal(packed.targets, torch.cat([responses[3], responses[0], responses[1]]))  # longest first
    assert torch.equal(torch.cat(responses)[packed.index], packed.targets)
    inputs = [torch.cat([prompt, response[:-1]]) for prompt, response in sequences]
    assert torch.equal(packed.input_ids[0], torch.cat([inputs[i] for i in (3, 0, 1)]))
    assert packed.position_ids[0].tolist() == [*range(8), *range(7), *range(6)]
    assert torch.equal(packed.input_ids[0, packed.predictors[:4]], inputs[3][4:])


shared_prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=20)


@given(sequences=shared_prompts)
@example(sequences=[(0, 22), (0, 10), (1, 0)])  # without its last token an empty response is longer than it seems
@example(sequences=[(0, 0), (0, 0)])
def test_each_lane_is_a_sequence_and_each_token_of_the_row_comes_out_once(sequences):
    """Prompts of 1 to 31 tokens, some of them the same."""
    rollout = random_rollout([response for _, response in sequences], group_size=1)
    lengths = torch.tensor([1 + 10 * prompt for prompt, _ in sequences])
    parts = [
        torch.cat([torch.full((int(length),), int(length)), response])
        for length, (_, response) in zip(lengths, rollout.sequences(), strict=True)
    ]
    rollout = replace(rollout, token_ids=torch.cat(parts), prompt_lengths=lengths)
    packed = pack(rollout, list(range(len(rollout))))
    row = packed.input_ids[0]
    different = {prompt for prompt, _ in sequences}
    assert len(row) == sum(1 + 10 * prompt for prompt in different) + sum(max(n - 1, 0) for _, n in sequences)
    picked = [torch.arange(len(row))[group.lay].flatten()[group.pick] for group in packed.lanes]
    assert torch.equal(torch.cat(picked), torch.arange(len(row)))
    inputs = [torch.cat([prompt, response[:-1]]) for prompt, response in rollout.sequences()]
    lanes_of = [row[lane] for group in packed.lanes for lane in group.lay]
    longest_first = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
    for i, lane in zip(longest_first, lanes_of, strict=True):
        assert torch.equal(lane[: len(inputs[i])], inputs[i])
        assert len(lane) <= 2 * len(inputs[i])
    ends = [
        torch.arange(int(n)) + int(prompt) - 1
        for prompt, n in zip(lengths[longest_first], packed.response_lengths, strict=True)
    ]
    assert torch.equal(packed.position_ids[0, packed.predictors], torch.cat(ends))


def test_a_prompt_of_one_token_without_a_response_packs():
    rollout = random_rollout([0, 2], prompt=1)
    packed = pack(rollout, [0, 1])
    assert packed.input_ids.shape[1] == 1 + 3
    assert len(packed.targets) == 2


def test_lengths_are_masks_even_if_padding_is_the_end_token():
    rollout = random_rollout([2, 5])
    rollout.token_ids[:] = 0  # every token is the end-of-sequence token
    assert len(pack(rollout, [0]).targets) == 2
    assert len(pack(rollout, [1]).targets) == 5
