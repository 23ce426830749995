import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.ragged import positions, segment_max, segment_mean, segment_sum, spread
from tests import plain

FUNCTIONS = [
    (segment_sum, math.fsum, 0.0),
    (segment_mean, plain.mean, 0.0),
    (segment_max, max, -math.inf),
]


def ragged(rows):
    return torch.tensor([v for row in rows for v in row]), torch.tensor([len(row) for row in rows], dtype=torch.int64)


@pytest.mark.parametrize(("function", "plainly", "of_nothing"), FUNCTIONS)
@plain.few
@given(rows=plain.rows)
def test_segments_equal_a_plain_loop(function, plainly, of_nothing, rows):
    got = function(*ragged(rows))
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got, [plainly(row) if row else of_nothing for row in rows], rtol=1e-12)


@pytest.mark.parametrize(("function", "plainly", "of_nothing"), FUNCTIONS)
@plain.few
@given(rows=st.lists(st.lists(st.booleans(), max_size=6), max_size=5))
def test_segments_take_masks(function, plainly, of_nothing, rows):
    values, lengths = ragged(rows)
    want = [float(plainly(row)) if row else of_nothing for row in rows]
    assert function(values.bool(), lengths).tolist() == want


def test_a_sum_keeps_what_float32_would_lose():
    assert segment_sum(torch.tensor([1e9, 1.0, -1e9, 2.0]), torch.tensor([3, 0, 1])).tolist() == [1.0, 0.0, 2.0]


@plain.few
@given(rows=plain.rows.filter(len))
def test_gradients_of_sum_and_mean_skip_empty_responses(rows):
    for function, gradient in ((segment_sum, lambda row: 1.0), (segment_mean, lambda row: 1 / len(row))):
        values, lengths = ragged(rows)
        values.requires_grad_()
        function(values, lengths).sum().backward()
        plain.assert_close(values.grad, [gradient(row) for row in rows for _ in row])


@plain.few
@given(rows=plain.rows)
def test_spread_gives_each_token_the_number_of_its_response(rows):
    numbers = [float(i) for i in range(len(rows))]
    _, lengths = ragged(rows)
    got = spread(torch.tensor(numbers), lengths)
    assert got.tolist() == plain.spread(numbers, lengths.tolist())
    back = [number if row else 0.0 for number, row in zip(numbers, rows, strict=True)]
    assert segment_mean(got, lengths).tolist() == back


@plain.few
@given(lengths=st.lists(st.integers(0, 9), max_size=6))
def test_positions_start_at_0_in_each_response(lengths):
    got = positions(torch.tensor(lengths, dtype=torch.int64))
    assert got.tolist() == [t for n in lengths for t in range(n)]
    assert got.dtype == torch.int64
