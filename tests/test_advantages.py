import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.advantages import AdvantageKind, advantages, check_group_size, soft_length_penalty
from tests import plain

KINDS = get_args(AdvantageKind)
COMPARES_SIBLINGS = [kind for kind in KINDS if kind != "batch"]

# Sums of tenths: 0.1 + 0.2 and 0.3 among them, and other rewards that differ by rounding only.
reward = st.builds(lambda a, b: float(np.float32(a / 10) + np.float32(b / 10)), *[st.integers(-10, 10)] * 2)
whole = st.integers(-3, 3).map(float)


@st.composite
def groups(draw, reward=reward | st.sampled_from([0.0, 1.0, math.nan]), min_size=1, scales=(1.0,)):
    size, scale = draw(st.integers(min_size, 6)), draw(st.sampled_from(scales))
    rows = draw(st.lists(st.lists(reward, min_size=size, max_size=size), max_size=4))
    return [r * scale for row in rows for r in row], size


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(groups=groups(scales=(1.0, 1e-6, 1e4)))
def test_equals_a_plain_loop(kind, groups):
    rewards, size = groups
    if size == 1 and kind != "batch":
        rewards, size = rewards + rewards, 2 * max(len(rewards), 1)
    got = advantages(torch.tensor(rewards, dtype=torch.float64), size, kind)
    assert got.dtype == torch.float32
    plain.assert_close(got, plain.advantages(rewards, size, kind, rewards))


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(groups=groups(min_size=2), others=st.lists(reward | st.just(math.nan), max_size=8), order=st.randoms())
def test_a_rank_gets_what_all_ranks_together_get(kind, groups, others, order):
    rewards, size = groups
    everyones = rewards + others
    order.shuffle(everyones)
    got = advantages(torch.tensor(rewards), size, kind, torch.tensor(everyones))
    plain.assert_close(got, plain.advantages(rewards, size, kind, everyones))


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(groups=groups(min_size=2), prompts=st.integers(0, 4))
def test_two_ranks_get_the_parts_of_the_whole(kind, groups, prompts):
    rewards, size = torch.tensor(groups[0]), groups[1]
    cut = min(prompts * size, len(rewards))
    parts = [advantages(part, size, kind, rewards) for part in (rewards[:cut], rewards[cut:])]
    torch.testing.assert_close(torch.cat(parts), advantages(rewards, size, kind), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("with_others", "with_all"), [("leave-one-out", "grpo"), ("rloo", "no-std")])
@plain.few
@given(groups=groups(reward=reward, min_size=2))
def test_leaving_oneself_out_multiplies_by_g_over_g_minus_1(with_others, with_all, groups):
    rewards, size = torch.tensor(groups[0]), groups[1]
    want = advantages(rewards, size, with_all) * size / (size - 1)
    torch.testing.assert_close(advantages(rewards, size, with_others), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(groups=groups(reward=whole | st.just(math.nan), min_size=2), shift=st.sampled_from([-50.0, 0.5, 7.0]))
def test_a_shift_of_all_rewards_changes_nothing(kind, groups, shift):
    rewards, size = torch.tensor(groups[0], dtype=torch.float64), groups[1]
    plain.assert_close(advantages(rewards + shift, size, kind), advantages(rewards, size, kind).double())


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(groups=groups(reward=whole, min_size=2), factor=st.sampled_from([2.0, 100.0]))
def test_the_scale_of_the_rewards_stays_only_where_nothing_divides_by_it(kind, groups, factor):
    rewards, size = torch.tensor(groups[0], dtype=torch.float64), groups[1]
    got, before = advantages(rewards * factor, size, kind), advantages(rewards, size, kind)
    if kind in ("no-std", "rloo"):
        torch.testing.assert_close(got, before * factor, rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(got, before, rtol=1e-5, atol=1e-6)  # 1e-6 is added to the deviation


@pytest.mark.parametrize("kind", COMPARES_SIBLINGS)
@plain.few
@given(groups=groups(min_size=2))
def test_the_advantages_of_a_group_sum_to_zero(kind, groups):
    rewards, size = groups
    sums = advantages(torch.tensor(rewards), size, kind).view(-1, size).double().sum(-1)
    assert (sums.abs() < 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_no_advantage(kind):
    assert advantages(torch.full((8,), 0.1), 4, kind).tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_differ_by_float_noise_are_equal(kind):
    noisy = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert advantages(noisy, 4, kind).tolist() == [0.0] * 4
    noisy32 = torch.tensor([0.1]) + torch.tensor([0.2])
    assert advantages(torch.cat([noisy32, torch.tensor([0.3, 0.3, 0.3])]), 4, kind).tolist() == [0.0] * 4


def test_small_rewards_are_no_noise():
    got = advantages(torch.tensor([0.0, 1e-7]), 2, "no-std")
    plain.assert_close(got, [-5e-8, 5e-8], floor=0)


@pytest.mark.parametrize("kind", KINDS)
def test_unscored_response_is_left_out(kind):
    got = advantages(torch.tensor([math.nan, 1.0, 0.0, 1.0]), 4, kind)
    assert got[0] == 0
    torch.testing.assert_close(got[1:], advantages(torch.tensor([1.0, 0.0, 1.0]), 3, kind))


@pytest.mark.parametrize("kind", COMPARES_SIBLINGS)
def test_a_response_whose_siblings_are_all_unscored_has_no_advantage(kind):
    assert advantages(torch.tensor([math.nan, 1.0, 0.0, 1.0]), 2, kind)[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_any_reward_has_no_advantage(kind):
    assert advantages(torch.full((4,), math.nan), 2, kind).tolist() == [0.0] * 4


def test_a_whole_batch_needs_no_siblings():
    got = advantages(torch.tensor([1.0, 0.0]), 1, "batch")
    plain.assert_close(got, [0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


@pytest.mark.parametrize("kind", COMPARES_SIBLINGS)
def test_groups_of_one_are_refused_where_siblings_are_compared(kind):
    for refuses in (lambda: check_group_size(1, kind), lambda: advantages(torch.ones(2), 1, kind)):
        with pytest.raises(ValueError, match=f"group_size=1: advantage='{kind}' .* at least 2; advantage='batch'"):
            refuses()


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="advantage='gae': must be one of grpo, no-std, leave-one-out"):
        check_group_size(8, "gae")


@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    max_tokens=st.integers(1, 32),
    buffer=st.integers(0, 32),
)
def test_length_penalty_equals_a_plain_loop(lengths, max_tokens, buffer):
    got = soft_length_penalty(torch.tensor(lengths, dtype=torch.int64), max_tokens, buffer)
    assert got.dtype == torch.float32
    plain.assert_close(got, [plain.soft_length_penalty(n, max_tokens, buffer) for n in lengths])


def test_length_penalty_rises_over_the_buffer():
    got = soft_length_penalty(torch.tensor([0, 16, 18, 20]), max_tokens=20, buffer=4)
    assert got.tolist() == [0.0, 0.0, 0.5, 1.0]
