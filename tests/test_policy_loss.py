import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.policy_loss import PolicyLoss, clipped, clipped_surrogate, probability_ratio, token_weights

number = st.floats(-3, 3, width=32)


@given(rows=st.lists(st.tuples(number, number), min_size=1, max_size=20))
def test_surrogate_equals_a_plain_loop(rows):
    log_ratio, advantages = torch.tensor(rows).T
    want = []
    for log_r, a in rows:
        r = np.exp(np.float64(log_r))
        want.append(min(r * a, min(max(r, 0.8), 1.24) * a))
    got = clipped_surrogate(log_ratio.exp(), advantages, 0.2, 0.24)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@given(rows=st.lists(st.tuples(number, number), min_size=1, max_size=20))
def test_clipped_tokens_are_those_without_gradient(rows):
    log_ratio, advantages = torch.tensor(rows).T
    ratio = log_ratio.exp().requires_grad_()
    (gradient,) = torch.autograd.grad(clipped_surrogate(ratio, advantages, 0.2, 0.24).sum(), ratio)
    cut = clipped(ratio.detach(), advantages, 0.2, 0.24)
    assert (gradient[cut] == 0).all()
    assert (gradient[~cut & (advantages != 0)] != 0).all()


@pytest.mark.parametrize(("new", "old"), [(0.0, -200.0), (-200.0, 0.0), (-200.0, -200.0)])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_gradients_are_finite_at_extreme_logprobs(new, old, advantage):
    logprobs = torch.tensor([new], requires_grad=True)
    ratio = probability_ratio(logprobs, torch.tensor([old]))
    clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.24).sum().backward()
    assert logprobs.grad.isfinite().all()


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_weights_of_each_aggregation(lengths):
    counts = torch.tensor(lengths)
    tokens, responses = counts.sum(), (counts > 0).sum()
    by_token = token_weights(counts, PolicyLoss(), tokens, responses)
    by_sequence = token_weights(counts, PolicyLoss(aggregation="sequence"), tokens, responses)
    by_norm = token_weights(counts, PolicyLoss(aggregation="sequence-sum-norm", norm_length=16), tokens, responses)
    filled = [n for n in lengths if n]
    np.testing.assert_allclose(by_token, [1 / sum(filled)] * sum(filled), rtol=1e-6)
    np.testing.assert_allclose(by_sequence, [1 / (len(filled) * n) for n in filled for _ in range(n)], rtol=1e-6)
    np.testing.assert_allclose(by_norm, [1 / (len(filled) * 16)] * sum(filled), rtol=1e-6)


@pytest.mark.parametrize("field", ["clip_low", "clip_high", "norm_length"])
def test_bad_settings_are_named(field):
    with pytest.raises(ValueError, match=f"{field}=-1"):
        PolicyLoss(**{field: -1})
