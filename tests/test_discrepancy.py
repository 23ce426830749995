import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.discrepancy import DiscrepancyKind, discrepancy, quantile, sequence_mean, token_mean
from tests import plain

KINDS = get_args(DiscrepancyKind)


@pytest.mark.parametrize("kind", KINDS)
@plain.few
@given(batch=plain.batches())
def test_equals_a_plain_loop(kind, batch):
    got = discrepancy(torch.tensor(batch.old), torch.tensor(batch.rollout), kind)
    assert got.dtype == torch.float32
    plain.assert_close(got, plain.discrepancy(batch.old, batch.rollout, kind))


@pytest.mark.parametrize("kind", KINDS)
@given(pairs=st.lists(st.tuples(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32)), max_size=20))
def test_is_finite_not_negative_and_zero_where_the_policies_agree(kind, pairs):
    old, rollout = torch.tensor(pairs).view(-1, 2).unbind(-1)
    got = discrepancy(old, rollout, kind)
    assert (got.isfinite() & (got >= 0)).all()
    assert (discrepancy(old, old, kind) == 0).all()


def test_a_ratio_counts_as_at_most_e_to_the_20():
    assert discrepancy(torch.tensor(-1.0), torch.tensor(-200.0), "ratio").item() == pytest.approx(math.exp(20) - 1)
    assert discrepancy(torch.tensor(-200.0), torch.tensor(-1.0), "ratio").item() == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_through_it(kind):
    old, rollout = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    assert not discrepancy(old, rollout, kind).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_lower_precision_is_computed_in_float32(kind):
    old, rollout = torch.tensor([-1.5, -0.25]), torch.tensor([-1.0, -8.0])
    got = discrepancy(old.bfloat16(), rollout.bfloat16(), kind)
    assert torch.equal(got, discrepancy(old, rollout, kind))


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="discrepancy='tv': must be one of probability, ratio, log"):
        discrepancy(torch.zeros(1), torch.zeros(1), "tv")


@plain.few
@given(rows=plain.rows)
def test_sequence_mean_takes_the_response_first_and_skips_empty_ones(rows):
    values, lengths = [v for row in rows for v in row], [len(row) for row in rows]
    got = sequence_mean(torch.tensor(values), torch.tensor(lengths, dtype=torch.int64))
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got, plain.sequence_mean(values, lengths), rtol=1e-12, equal_nan=True)


@plain.few
@given(values=st.lists(plain.logprobs, max_size=20))
def test_token_mean_is_that_of_all_tokens(values):
    want = plain.mean(values) if values else math.nan
    np.testing.assert_allclose(token_mean(torch.tensor(values)), want, rtol=1e-12, equal_nan=True)


def test_the_two_means_differ_where_lengths_do():
    values, lengths = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1, 3])
    assert sequence_mean(values, lengths).item() == 0.5
    assert token_mean(values).item() == 0.25


@given(values=st.lists(plain.logprobs, min_size=1, max_size=20), percent=st.integers(0, 100))
def test_a_quantile_is_the_smallest_that_its_share_does_not_exceed(values, percent):
    assert quantile(torch.tensor(values), percent / 100).item() == plain.quantile(values, percent)


def test_a_quantile_of_100_numbers_is_one_of_them_whatever_rounds():
    numbers = torch.arange(1, 101).flip(0)
    assert [quantile(numbers, percent / 100).item() for percent in range(1, 101)] == list(range(1, 101))
