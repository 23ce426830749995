from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.reference_kl import Estimator, ReferenceKL, reference_kl
from tests import plain

ESTIMATORS = get_args(Estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@plain.few
@given(batch=plain.batches())
def test_value_and_gradient_equal_a_plain_loop(estimator, batch):
    new, old, reference = torch.tensor(batch.new, requires_grad=True), batch.old, batch.reference
    got = reference_kl(new, torch.tensor(old), torch.tensor(reference), estimator)
    (gradient,) = torch.autograd.grad(got.sum(), new)
    want = [plain.reference_kl(*token, estimator) for token in zip(batch.new, old, reference, strict=True)]
    ratios = torch.tensor([max(plain.ratio(*pair), 1.0) for pair in zip(batch.new, old, strict=True)])
    # The floor is that of the estimate, which is then multiplied by the ratio.
    plain.assert_close(got.detach() / ratios, [value / r for (value, _), r in zip(want, ratios.tolist(), strict=True)])
    plain.assert_close(gradient, [slope for _, slope in want])


numbers = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@plain.few
@given(logits=numbers, old=numbers, reference=numbers)
def test_on_average_the_gradient_is_that_of_the_divergence(estimator, on_policy, logits, old, reference):
    policy = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = policy.log_softmax(-1)
    sampling, other = torch.tensor([old, reference], dtype=torch.float64).log_softmax(-1)
    if on_policy:
        sampling = logprobs.detach()
    average = (sampling.exp() * reference_kl(logprobs, sampling, other, estimator)).sum()
    divergence = (logprobs.exp() * (logprobs - other)).sum()
    (got,), (want,) = (torch.autograd.grad(x, policy, retain_graph=True) for x in (average, divergence))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@plain.few
@given(logits=numbers, old=numbers, reference=numbers)
def test_on_average_the_value_is_the_divergence(estimator, on_policy, logits, old, reference):
    logprobs, sampling, other = torch.tensor([logits, old, reference], dtype=torch.float64).log_softmax(-1)
    if on_policy:
        sampling = logprobs
    average = (sampling.exp() * reference_kl(logprobs, sampling, other, estimator)).sum()
    torch.testing.assert_close(average, (logprobs.exp() * (logprobs - other)).sum(), rtol=1e-9, atol=1e-12)


def test_k2_is_near_the_divergence_of_policies_that_are_near():
    logits = torch.randn(7, dtype=torch.float64)
    logprobs, other = logits.log_softmax(-1), (logits + 1e-2 * torch.randn(7, dtype=torch.float64)).log_softmax(-1)
    average = (logprobs.exp() * reference_kl(logprobs, logprobs, other, "k2")).sum()
    torch.testing.assert_close(average, (logprobs.exp() * (logprobs - other)).sum(), rtol=0.05, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_policies_that_agree_cost_nothing(estimator):
    logprobs = torch.tensor([-200.0, -1.0, 0.0], requires_grad=True)
    got = reference_kl(logprobs, logprobs.detach() - 0.5, logprobs.detach(), estimator)
    got.sum().backward()
    assert got.tolist() == [0.0] * 3
    assert logprobs.grad.tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_everything_is_finite_at_extreme_logprobs(estimator):
    extremes = torch.tensor([-200.0, -100.0, -1.0, 0.0])
    new, old, reference = torch.cartesian_prod(extremes, extremes, extremes).T.contiguous()
    got = reference_kl(new.requires_grad_(), old, reference, estimator)
    got.sum().backward()
    assert got.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_flows_to_the_trained_policy_only(estimator):
    new, old, reference = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.5, -2.0))
    reference_kl(new, old, reference, estimator).sum().backward()
    assert new.grad.any()
    assert old.grad is None
    assert reference.grad is None


@pytest.mark.parametrize("coefficient", [-0.1, float("nan")])
def test_bad_settings_are_named(coefficient):
    with pytest.raises(ValueError, match=f"coefficient={coefficient}"):
        ReferenceKL(coefficient)
