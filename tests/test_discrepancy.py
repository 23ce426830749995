import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.discrepancy import (
    discrepancy,
    discrepancy_statistics,
    mismatch_metrics,
    sequence_mean,
    token_mean,
)

logprob = st.floats(-200, 0, width=32)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20)


def reference(a, b, kind):
    p, q = math.exp(a), math.exp(b)
    if kind == "probability":
        return abs(p - q)
    if kind == "log":
        return abs(a - b)
    return abs(math.exp(a - b) - 1)


@pytest.mark.parametrize("kind", ["probability", "ratio", "log"])
@given(pairs=pairs)
def test_equals_a_plain_loop(kind, pairs):
    old, rollout = torch.tensor(pairs).T
    with np.errstate(over="ignore"):
        want = np.array([reference(a, b, kind) for a, b in pairs], dtype=np.float32)
    np.testing.assert_allclose(discrepancy(old, rollout, kind).numpy(), want, rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_it():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not discrepancy(old, torch.tensor([-1.1, -2.0])).requires_grad


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'tv' is not one of probability, ratio, log"):
        discrepancy(torch.zeros(1), torch.zeros(1), "tv")


@given(rows=st.lists(st.lists(st.floats(0, 1, width=32), max_size=5), min_size=1, max_size=5))
def test_sequence_mean_takes_the_response_first_and_skips_empty_ones(rows):
    values = torch.tensor([v for row in rows for v in row])
    got = sequence_mean(values, torch.tensor([len(row) for row in rows])).item()
    means = [sum(row) / len(row) for row in rows if row]
    want = sum(means) / len(means) if means else math.nan
    np.testing.assert_allclose(got, want, rtol=1e-6, equal_nan=True)


def test_the_two_means_differ_where_lengths_do():
    values, lengths = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1, 3])
    assert sequence_mean(values, lengths).item() == 0.5
    assert token_mean(values).item() == 0.25


def test_statistics_of_a_known_tail():
    delta = torch.arange(1, 101) / 100
    statistics = discrepancy_statistics(delta, torch.tensor([60, 40]))
    assert statistics["discrepancy/p99"].item() == pytest.approx(0.99)
    assert statistics["discrepancy/max"].item() == 1.0


def test_mismatch_metrics_on_a_hand_case():
    old, rollout = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.25]).log()
    metrics = {name: value.item() for name, value in mismatch_metrics(old, rollout).items()}
    gap = math.log(2)
    assert metrics["rollout_corr/kl"] == pytest.approx(-gap / 2)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((2 - gap - 1) / 2)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((4 + 1) / 2 - 1)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.125)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.125)
