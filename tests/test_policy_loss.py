import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.policy_loss import (
    CISPO,
    DPPO,
    GSPO,
    Aggregation,
    PPOClip,
    approx_kl,
    probability_ratio,
    token_weights,
)
from tests import plain

AGGREGATIONS = get_args(Aggregation)

LOSSES = {
    "ppo": (PPOClip(), lambda batch: plain.ppo_clip(batch, 0.2, 0.24)),
    "ppo-narrow": (PPOClip(0.0, 0.1), lambda batch: plain.ppo_clip(batch, 0.0, 0.1)),
    "ppo-dual": (PPOClip(dual_clip=3.0), lambda batch: plain.ppo_clip(batch, 0.2, 0.24, dual=3.0)),
    "gspo": (GSPO(), lambda batch: plain.gspo(batch, 3e-4, 4e-4)),
    "gspo-wide": (GSPO(0.2, 0.3), lambda batch: plain.gspo(batch, 0.2, 0.3)),
    "cispo": (CISPO(), lambda batch: plain.cispo(batch, 0.0, 5.0)),
    "cispo-narrow": (CISPO(0.5, 1.5), lambda batch: plain.cispo(batch, 0.5, 1.5)),
    "dppo": (DPPO(), lambda batch: plain.dppo(batch, 0.2)),
    "dppo-narrow": (DPPO(0.01), lambda batch: plain.dppo(batch, 0.01)),
}
every_loss = pytest.mark.parametrize(("loss", "plainly"), LOSSES.values(), ids=LOSSES)


def evaluate(loss, batch):
    """Objective, gradient by the log-probs, and cut side of each token; nothing else has a gradient."""
    given = [torch.tensor(column, requires_grad=True) for column in (batch.new, batch.old, batch.rollout)]
    given.append(torch.tensor(batch.advantages, requires_grad=True))
    objective, side = loss(*given, torch.tensor(batch.lengths, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(objective.sum(), given[:1])
    return objective.detach(), gradient, side


@every_loss
@plain.many
@given(batch=plain.batches())
def test_objective_gradient_and_cut_side_equal_a_plain_loop(loss, plainly, batch):
    objective, gradient, side = evaluate(loss, batch)
    want = np.array(plainly(batch)).reshape(-1, 3)
    assert objective.dtype == torch.float32
    assert side.dtype == torch.int8
    plain.assert_close(objective, want[:, 0])
    plain.assert_close(gradient, want[:, 1])
    assert side.tolist() == want[:, 2].tolist()


@pytest.mark.parametrize(
    ("loss", "advantage", "sides"),
    [
        (PPOClip(), 1.0, {0.7: 0, 1.23: 0, 1.25: 1, 3.5: 1}),
        (PPOClip(), -1.0, {0.79: -1, 0.81: 0, 1.3: 0, 3.5: 0}),
        (PPOClip(dual_clip=3.0), 1.0, {0.7: 0, 1.23: 0, 1.25: 1, 3.5: 1}),
        (PPOClip(dual_clip=3.0), -1.0, {0.79: -1, 0.81: 0, 2.9: 0, 3.1: 1}),
        (GSPO(), 1.0, {0.99: 0, 1.0003: 0, 1.0005: 1}),
        (GSPO(), -1.0, {0.9996: -1, 0.9998: 0, 1.01: 0}),
        (CISPO(0.5, 1.5), 1.0, {0.4: -1, 0.6: 0, 1.4: 0, 1.6: 1}),
        (CISPO(0.5, 1.5), -1.0, {0.4: -1, 0.6: 0, 1.4: 0, 1.6: 1}),
        (DPPO(), 1.0, {0.1: 0, 1.7: 0, 1.9: 1}),
        (DPPO(), -1.0, {0.1: -1, 0.3: 0, 1.9: 0}),
        (PPOClip(), 0.0, {0.1: 0, 1.0: 0, 3.5: 0}),
    ],
)
def test_the_side_on_which_a_ratio_is_cut(loss, advantage, sides):
    old = torch.full((len(sides),), 0.25).log()  # p - q is between -0.25 and 0.75
    new = old + torch.tensor(list(sides)).log()
    _, side = loss(new, old, old, torch.full_like(old, advantage), torch.ones(len(sides), dtype=torch.int64))
    assert side.tolist() == list(sides.values())


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("cispo")])
@plain.few
@given(batch=plain.batches(plain.close_gaps))
def test_cut_tokens_and_only_they_have_no_gradient(name, batch):
    loss, plainly = LOSSES[name]
    plainly(batch)  # that no token is on an edge
    _, gradient, side = evaluate(loss, batch)
    assert (gradient[side != 0] == 0).all()
    assert (gradient[(side == 0) & (torch.tensor(batch.advantages) != 0)] != 0).all()


@plain.few
@given(batch=plain.batches(plain.close_gaps))
def test_cispo_cuts_no_gradient(batch):
    _, gradient, _ = evaluate(CISPO(0.5, 1.5), batch)
    assert ((gradient != 0) == (torch.tensor(batch.advantages) != 0)).all()


@every_loss
def test_everything_is_finite_at_extreme_logprobs(loss, plainly):
    extremes = (-200.0, -100.0, 0.0)
    new, old, rollout, advantages = zip(*itertools.product(extremes, extremes, extremes, (-1.0, 0.0, 1.0)), strict=True)
    for lengths in ([1] * 81, [40, 0, 41]):
        batch = plain.Batch(new, old, rollout, reference=[], advantages=advantages, keep=[], lengths=lengths)
        objective, gradient, _ = evaluate(loss, batch)
        assert objective.isfinite().all()
        assert gradient.isfinite().all()


@every_loss
def test_no_gradient_flows_to_what_is_given(loss, plainly):
    columns = [[-1.0, -2.0], [-1.1, -2.0], [-1.2, -2.1], [1.0, -1.0]]
    logprobs, *constants = [torch.tensor(column, requires_grad=True) for column in columns]
    loss(logprobs, *constants, torch.tensor([2]))[0].sum().backward()
    assert logprobs.grad.any()
    assert all(constant.grad is None for constant in constants)


@every_loss
@plain.few
@given(batch=plain.batches(st.just(0.0)))
def test_on_policy_the_gradient_is_the_advantage(loss, plainly, batch):
    _, gradient, side = evaluate(loss, batch)
    assert gradient.tolist() == batch.advantages
    assert not side.any()


@plain.few
@given(batch=plain.batches())
def test_dual_clip_bounds_what_a_negative_advantage_can_cost(batch):
    advantages = torch.tensor(batch.advantages)
    plainly, _, _ = evaluate(PPOClip(), batch)
    dual, _, _ = evaluate(PPOClip(dual_clip=3.0), batch)
    negative = advantages < 0
    assert (dual[negative] >= 3.0 * advantages[negative]).all()
    torch.testing.assert_close(dual, torch.where(negative, plainly.maximum(3.0 * advantages), plainly))


@pytest.mark.parametrize("low_high", [(3e-4, 4e-4), (0.2, 0.3)])
@plain.few
@given(batch=plain.batches(plain.close_gaps, min_responses=1))
def test_gspo_with_one_advantage_per_response_is_the_sequence_objective(low_high, batch):
    """Mean over the responses of min(s A, clip(s) A), differentiated through s, the mean over tokens included."""
    of_responses = [sum(response[:1]) for response in plain.split(batch.advantages, batch.lengths)]
    low, high = low_high
    logprobs = torch.tensor(batch.new, dtype=torch.float64, requires_grad=True)
    gaps = (logprobs - torch.tensor(batch.old)).split(batch.lengths)
    objectives = []
    for gap, advantage in zip(gaps, of_responses, strict=True):
        if len(gap):
            s = gap.mean().exp()
            for bound in (1 - low, 1 + high):
                plain.above(s.item(), bound)
            objectives.append(torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    total = sum(objectives, logprobs.sum() * 0) / max(len(objectives), 1)
    (want,) = torch.autograd.grad(total, logprobs)

    lengths = torch.tensor(batch.lengths)
    given = torch.tensor(batch.new, requires_grad=True)
    advantages = torch.tensor(of_responses, dtype=torch.float32).repeat_interleave(lengths)
    objective, _ = GSPO(low, high)(given, torch.tensor(batch.old), torch.tensor(batch.rollout), advantages, lengths)
    keep = torch.ones(len(given), dtype=torch.bool)
    weights = token_weights(lengths, keep, lengths.sum(), (lengths > 0).sum(), "sequence")
    (got,) = torch.autograd.grad((weights * objective).sum(), given)
    plain.assert_close((weights * objective).sum().detach(), total.item())
    plain.assert_close(got, want)


@plain.few
@given(batch=plain.batches())
def test_ratio_and_approximate_kl_equal_a_plain_loop(batch):
    new, old = torch.tensor(batch.new), torch.tensor(batch.old)
    pairs = list(zip(batch.new, batch.old, strict=True))
    plain.assert_close(probability_ratio(new, old), [plain.ratio(*pair) for pair in pairs])
    plain.assert_close(approx_kl(new, old), [plain.approx_kl(*pair) for pair in pairs])
    assert (approx_kl(new, old) >= 0).all()


def test_the_approximate_kl_is_on_average_the_divergence_of_the_policies():
    old, new = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    divergence = (old.exp() * (old - new)).sum()
    torch.testing.assert_close((old.exp() * approx_kl(new, old)).sum(), divergence)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@plain.few
@given(batch=plain.batches())
def test_weights_sum_objectives_to_a_plain_mean(aggregation, batch):
    lengths, keep = torch.tensor(batch.lengths, dtype=torch.int64), torch.tensor(batch.keep, dtype=torch.bool)
    weights = token_weights(lengths, keep, *counts(batch), aggregation, norm_length=7)
    assert weights.dtype == torch.float32
    assert weights.isfinite().all()
    assert ((weights > 0) == keep).all()
    want = plain.aggregate(batch.advantages, batch.lengths, batch.keep, aggregation, 7)
    plain.assert_close((weights.double() * torch.tensor(batch.advantages)).sum(), want)


def counts(batch):
    kept = [sum(keeps) for keeps in plain.split(batch.keep, batch.lengths)]
    return torch.tensor(sum(kept)), torch.tensor(sum(n > 0 for n in kept))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@plain.few
@given(batch=plain.batches(), cut=st.integers(0, 5))
def test_weights_do_not_depend_on_micro_batches(aggregation, batch, cut):
    lengths, keep = torch.tensor(batch.lengths, dtype=torch.int64), torch.tensor(batch.keep, dtype=torch.bool)
    tokens = int(lengths[:cut].sum())
    parts = [(lengths[:cut], keep[:tokens]), (lengths[cut:], keep[tokens:])]
    got = [token_weights(*part, *counts(batch), aggregation) for part in parts]
    assert torch.equal(torch.cat(got), token_weights(lengths, keep, *counts(batch), aggregation))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (PPOClip, {"clip_low": -0.1}, "clip_low=-0.1"),
        (PPOClip, {"clip_low": 1.0}, "clip_low=1.0"),
        (PPOClip, {"clip_high": -0.1}, "clip_high=-0.1"),
        (PPOClip, {"clip_high": math.nan}, "clip_high=nan"),
        (PPOClip, {"dual_clip": 1.24}, "dual_clip=1.24: must be above 1 \\+ clip_high=1.24"),
        (GSPO, {"sequence_clip_low": 1.5}, "sequence_clip_low=1.5"),
        (GSPO, {"sequence_clip_high": -1e-4}, "sequence_clip_high=-0.0001"),
        (CISPO, {"ratio_low": -0.1}, "ratio_low=-0.1"),
        (CISPO, {"ratio_low": 1.1}, "ratio_low=1.1"),
        (CISPO, {"ratio_high": 0.9}, "ratio_low=0.0, ratio_high=0.9"),
        (DPPO, {"threshold": 0.0}, "threshold=0.0"),
        (DPPO, {"threshold": 1.1}, "threshold=1.1"),
    ],
)
def test_bad_settings_are_named(loss, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        loss(**settings)
