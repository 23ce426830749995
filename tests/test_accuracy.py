import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.accuracy import ProblemMeans, avg_at_k, interval, maj_at_k, pass_at_k

correct = st.lists(st.booleans(), min_size=1, max_size=7)


def row(values, dtype=torch.bool):
    return torch.tensor([values], dtype=dtype)


def test_the_hand_case():
    responses = torch.tensor([[True, False, False, False], [False] * 4, [True] * 4])
    assert avg_at_k(responses).tolist() == [0.25, 0.0, 1.0]
    assert pass_at_k(responses, 2).tolist() == [0.5, 0.0, 1.0]
    classes = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2], [0, 0, 0, 0]])
    assert maj_at_k(responses, classes).tolist() == [0.0, 0.0, 1.0]


@given(correct, st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(values, k):
    if k > len(values):
        with pytest.raises(ValueError, match=f"k={k}"):
            pass_at_k(row(values), k)
        return
    choices = list(itertools.combinations(values, k))
    expected = Fraction(sum(map(any, choices)), len(choices))
    assert pass_at_k(row(values), k).item() == pytest.approx(float(expected), abs=1e-12)


def test_pass_at_k_does_not_overflow():
    values = torch.zeros(1, 2000, dtype=torch.bool)
    values[0, 0] = True
    assert pass_at_k(values, 1000).item() == pytest.approx(0.5)


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=8))
def test_maj_at_k_by_hand(answers):  # "a" is right
    classes = row([-1 if answer is None else "abc".index(answer) for answer in answers], torch.int64)
    votes = Counter(answer for answer in answers if answer)
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    expected = ("a" in top) / len(top) if top else 0.0
    right = row([answer == "a" for answer in answers])
    assert maj_at_k(right, classes).item() == pytest.approx(expected)


def test_the_interval_is_that_of_plain_resampling():
    values = np.random.default_rng(1).random(40)
    draw = np.random.default_rng(0)
    means = []
    while len(means) < 9999:  # in the batches that the seed's draws come in
        count = min(500, 9999 - len(means))
        means += [values[picks].mean() for picks in draw.integers(0, 40, (count, 40))]
    expected = np.percentile(means, [2.5, 97.5])
    assert interval(values) == pytest.approx(tuple(expected), abs=1e-12)


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = interval(draw.random(60) < 0.3, seed=trial)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_one_problem_has_no_interval_and_equal_ones_an_empty_one():
    assert all(map(math.isnan, interval([0.5])))
    assert interval([0.5] * 10) == (0.5, 0.5)


def test_means_do_not_depend_on_the_order_of_problems():
    values = torch.rand(30, dtype=torch.float64)
    lengths = values * 100
    whole, parts = ProblemMeans("a", "b"), ProblemMeans("a", "b")
    whole.update({"a": values, "b": lengths})
    for some in torch.randperm(30).split(7):
        parts.update({"b": lengths[some], "a": values[some]})
    assert parts.compute() == whole.compute()
    mean, low, high = whole.compute()["a"]
    assert mean == pytest.approx(values.mean().item())
    assert low < mean < high
    assert math.isnan(ProblemMeans("a").compute()["a"][0])
