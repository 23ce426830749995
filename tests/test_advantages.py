import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.advantages import group_advantages


def reference(rewards, group_size, normalize_std):
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scored = [r for r in group if not math.isnan(r)]
        for reward in group:
            if math.isnan(reward) or len(scored) < 2:
                advantages.append(0.0)
                continue
            value = reward - sum(scored) / len(scored)
            if normalize_std:
                value /= np.std(scored, ddof=1) + 1e-6
            advantages.append(value)
    return advantages


rewards = st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0, math.nan]), min_size=4, max_size=4)


@given(groups=st.lists(rewards, min_size=1, max_size=4), normalize_std=st.booleans())
def test_equals_a_plain_loop(groups, normalize_std):
    flat = [r for group in groups for r in group]
    got = group_advantages(torch.tensor(flat), 4, normalize_std=normalize_std)
    np.testing.assert_allclose(got.numpy(), reference(flat, 4, normalize_std), atol=1e-5)


def test_equal_rewards_have_no_advantage():
    assert group_advantages(torch.ones(8), 4).tolist() == [0.0] * 8


def test_rewards_that_differ_by_float_noise_are_equal():
    noisy = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert group_advantages(noisy, 4).tolist() == [0.0] * 4
    noisy32 = torch.tensor([0.1]) + torch.tensor([0.2])
    assert group_advantages(torch.cat([noisy32, torch.tensor([0.3, 0.3, 0.3])]), 4).tolist() == [0.0] * 4


def test_unscored_response_is_left_out():
    got = group_advantages(torch.tensor([math.nan, 1.0, 0.0, 1.0]), 4)
    alone = group_advantages(torch.tensor([1.0, 0.0, 1.0]), 3)
    assert got[0] == 0
    torch.testing.assert_close(got[1:], alone)
