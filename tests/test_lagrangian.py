import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.callbacks import FixedPenalty, LagrangianCallback
from dclightning.lagrangian import dual_ascent, penalized_advantages, running_budget
from tests import plain

unit = st.floats(0, 1)


@given(multiplier=unit, discrepancy=unit, budget=unit, lr=st.floats(0, 10))
def test_dual_ascent_is_the_projected_step(multiplier, discrepancy, budget, lr):
    step = multiplier + lr * (discrepancy - budget)
    assert dual_ascent(multiplier, discrepancy, budget, lr, (0.0, 1.0)) == max(0.0, min(1.0, step))


@pytest.mark.parametrize("discrepancy", [math.nan, math.inf])
def test_a_mean_that_is_not_finite_moves_nothing(discrepancy):
    assert dual_ascent(0.3, discrepancy, 0.1, 1.0, (0.0, 1.0)) == 0.3


def test_penalty_is_subtracted_and_nothing_is_centred_again():
    got = penalized_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.5]))
    assert got.tolist() == [0.75, -0.5]


@given(discrepancies=st.lists(unit, min_size=1, max_size=9), quantile=unit, slack=st.floats(0, 2))
def test_running_budget_is_a_quantile_and_some_slack(discrepancies, quantile, slack):
    got = running_budget(discrepancies, quantile, slack)
    assert got == pytest.approx(plain.running_budget(discrepancies, quantile, slack), rel=1e-9, abs=1e-12)


def test_callback_charges_its_multiplier():
    callback = LagrangianCallback(initial=0.5)
    assert callback.penalty(torch.tensor([0.0, 0.2])).tolist() == pytest.approx([0.0, 0.1])


def test_fixed_penalties_above_a_threshold():
    delta = torch.tensor([0.1, 0.3])
    assert FixedPenalty(2.0).penalty(delta).tolist() == pytest.approx([0.2, 0.6])
    assert FixedPenalty(2.0, threshold=0.2).penalty(delta).tolist() == pytest.approx([0.0, 0.2])
    assert FixedPenalty(2.0, threshold=0.2, form="gate").penalty(delta).tolist() == pytest.approx([0.0, 0.6])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 2.0}, "initial=2.0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"budget": -0.1}, "budget=-0.1"),
        ({"initial": 0.0, "min_multiplier": 0.1}, "initial=0.0"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LagrangianCallback(**arguments)


def test_state_round_trip():
    first, second = LagrangianCallback(initial=0.5), LagrangianCallback()
    first.multiplier, first.history = 0.7, [0.5, 0.6]
    second.load_state_dict(first.state_dict())
    assert (second.multiplier, second.history) == (0.7, [0.5, 0.6])
