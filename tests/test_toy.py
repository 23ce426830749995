import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from dclightning.errors import UserError
from dclightning.one_state import KINDS, budget_spent, optimal_policy, ratio_support_limit, solve_numerically
from dclightning.toy import COLOURS, NAMES, draw, main

Q = np.array([0.36, 0.30, 0.14, 0.12, 0.04, 0.04])
A = np.array([-0.8, 0.8, -1.0, 1.0, -1.0, 1.2])


@st.composite
def states(draw):
    n = draw(st.integers(2, 6))
    weights = np.array(draw(st.lists(st.integers(2, 100), min_size=n, max_size=n)), dtype=float)
    advantages = np.array(draw(st.lists(st.integers(-20, 20), min_size=n, max_size=n))) / 10
    return weights / weights.sum(), advantages


budgets = st.floats(-4, -0.5).map(lambda exponent: 10.0**exponent)


def price(policy, q, kind):
    """What the budget's derivative is, by hand: λ times it is what an action's advantage must exceed ν by."""
    if kind == "probability":
        return 2 * q * (policy - q)
    return 2 * (policy / q - 1) if kind == "ratio" else 2 * np.log(policy / q) * q / policy


def random_cases(count):
    generator = np.random.default_rng(0)
    for _ in range(count):
        n = generator.integers(2, 9)
        q = np.maximum(generator.dirichlet(np.ones(n)), 0.01)
        yield q / q.sum(), generator.normal(size=n), 10 ** generator.uniform(-4, -1)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("probability", [0.313, 0.308, 0.002, 0.159, 0, 0.218]),
        ("ratio", [0.339, 0.321, 0.129, 0.130, 0.037, 0.044]),
        ("log", [0.338, 0.320, 0.130, 0.130, 0.037, 0.044]),
    ],
)
def test_the_built_in_case_has_the_known_solution(kind, policy):
    np.testing.assert_allclose(optimal_policy(Q, A, 0.005, kind).policy, policy, rtol=0, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_closed_form_and_solver_agree(kind):
    for q, advantages, epsilon in random_cases(100):
        closed = optimal_policy(q, advantages, epsilon, kind)
        solved = solve_numerically(q, advantages, epsilon, kind, starts=4 if kind == "log" else 0)
        np.testing.assert_allclose(closed.policy, solved, rtol=0, atol=1e-6)
        assert closed.expected_advantage == pytest.approx(solved @ advantages, rel=0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(state=states(), epsilon=budgets)
def test_the_conditions_of_an_optimum_hold(kind, state, epsilon):
    q, advantages = state
    optimum = optimal_policy(q, advantages, epsilon, kind)
    policy = optimum.policy
    assert policy.sum() == pytest.approx(1, abs=1e-12)
    assert policy.min() >= 0
    assert optimum.spent == budget_spent(policy, q, kind)
    assert optimum.expected_advantage == policy @ advantages
    if optimum.multiplier == 0:
        assert optimum.spent <= epsilon * (1 + 1e-9)
        assert optimum.nu == advantages.max()
        assert set(advantages[policy > 0]) == {advantages.max()}
        return
    assert optimum.multiplier > 0
    assert optimum.spent == pytest.approx(epsilon, rel=1e-7)
    excess = advantages - optimum.nu - optimum.multiplier * price(policy, q, kind)
    np.testing.assert_allclose(excess[policy > 1e-9], 0, atol=1e-6)
    assert excess.max() <= 1e-6


@given(state=states(), part=st.floats(0.01, 0.99))
def test_ratio_has_a_formula_for_its_multipliers_while_it_keeps_every_action(state, part):
    q, advantages = state
    if np.ptp(advantages) == 0:
        assert ratio_support_limit(q, advantages) == np.inf
        return
    epsilon = part * ratio_support_limit(q, advantages)
    optimum = optimal_policy(q, advantages, epsilon, "ratio")
    mean = q @ advantages
    variance = q @ (advantages - mean) ** 2
    assert optimum.policy.min() > 0
    assert optimum.nu == pytest.approx(mean, abs=1e-9)
    assert optimum.multiplier == pytest.approx(np.sqrt(variance / (4 * epsilon)), rel=1e-9)


@given(state=states().filter(lambda state: np.ptp(state[1]) > 0), factor=st.floats(1.01, 10))
def test_ratio_drops_the_worst_action_beyond_its_limit(state, factor):
    q, advantages = state
    policy = optimal_policy(q, advantages, factor * ratio_support_limit(q, advantages), "ratio").policy
    assert set(policy[advantages == advantages.min()]) == {0}


def test_probability_keeps_no_more_actions_than_the_others_and_log_keeps_all():
    fewer = 0
    for q, advantages, epsilon in random_cases(100):
        kept = {kind: int((optimal_policy(q, advantages, epsilon, kind).policy > 1e-6).sum()) for kind in KINDS}
        assert kept["probability"] <= kept["ratio"] <= kept["log"] == len(q)
        fewer += kept["probability"] < kept["ratio"]
    assert fewer > 20


def test_a_rare_good_action_gains_most_under_probability_and_least_under_ratio():
    probability, ratio, log = (optimal_policy(Q, A, 0.005, kind).policy[5] for kind in KINDS)
    assert probability > log > ratio > Q[5]


def test_a_good_action_can_lose():
    optimum = optimal_policy(Q, A, 0.02, "probability")
    assert A[1] < optimum.nu
    assert 0 < optimum.policy[1] < Q[1]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_advantages_leave_the_policy_alone(kind):
    optimum = optimal_policy(Q, np.full(6, 0.3), 0.005, kind)
    np.testing.assert_allclose(optimum.policy, Q, rtol=1e-12)
    assert (optimum.multiplier, optimum.nu) == (0, 0.3)


@pytest.mark.parametrize("kind", ["probability", "ratio"])
def test_a_large_budget_is_not_spent(kind):
    optimum = optimal_policy(Q, A, 30, kind)
    np.testing.assert_array_equal(optimum.policy, [0, 0, 0, 0, 0, 1])
    assert optimum.multiplier == 0
    assert optimum.spent < 30


def test_the_best_actions_of_a_tie_share_so_as_to_spend_least():
    q, advantages = np.array([0.5, 0.3, 0.2]), np.array([-1.0, 1.0, 1.0])
    np.testing.assert_allclose(optimal_policy(q, advantages, 5, "ratio").policy, [0, 0.6, 0.4])
    # q (π - q) is the same for both.
    np.testing.assert_allclose(optimal_policy(q, advantages, 5, "probability").policy, [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("q", "advantages", "epsilon", "beyond"),
    [
        (Q, A, 0.3, 5),
        ([0.05, 0.95], [1, 0], 0.3, 0),
        ([0.05, 0.6, 0.35], [1, 0, 0], 0.3, 0),
        ([0.1, 0.001, 0.899], [1, 0.95, -1], 0.02, 1),  # not the best action, but a rarer one
    ],
)
def test_an_action_beyond_e_is_on_the_other_branch_of_lambert_w(q, advantages, epsilon, beyond):
    q, advantages = np.array(q), np.array(advantages, dtype=float)
    optimum = optimal_policy(q, advantages, epsilon, "log")
    assert list(np.flatnonzero(optimum.policy > np.e * q)) == [beyond]
    np.testing.assert_allclose(optimum.policy, solve_numerically(q, advantages, epsilon, "log"), rtol=0, atol=1e-6)
    price_paid = optimum.multiplier * price(optimum.policy, q, "log")
    np.testing.assert_allclose(advantages - optimum.nu, price_paid, rtol=1e-6, atol=1e-9)


def test_the_command_prints_the_policies_and_draws_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    main(["toy"])
    lines = capsys.readouterr().out.splitlines()
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]] for line in lines if (cells := line.split("│")[1:-1])
    }
    assert rows["6"] == ["0.040", "1.2", "0.218", "0.044", "0.044"]
    assert rows["3"] == ["0.140", "-1", "0.002", "0.129", "0.130"]
    assert rows["λ (budget)"] == ["", "", "41.58", "6.231", "6.269"]
    assert rows["ν (simplex)"] == ["", "", "0.6076", "-0.06", "0.03398"]
    assert rows["advantage ΣπA"] == ["-0.0600", "", "0.4148", "0.0023", "0.0026"]
    assert rows["budget spent"][2:] == ["0.005"] * 3
    assert rows["actions > 1e-6"] == ["6", "", "5", "6", "6"]
    assert all(float(gap) < 1e-6 for gap in rows["solver gap, π"][2:] + rows["solver gap, ΣπA"][2:])
    assert "here 0.879" in "\n".join(lines)
    assert lines[-1].split() == ["figure", "toy.png"]

    data = (tmp_path / "toy.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 630)
    pixels = np.round(imread(tmp_path / "toy.png")[..., :3] * 255).astype(int)
    for colour in COLOURS.values():
        assert (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).sum() > 500


def test_the_bars_are_what_each_action_gains():
    optima = {kind: optimal_policy(Q, A, 0.005, kind) for kind in KINDS}
    axes = draw(Q, A, 0.005, optima).axes[0]
    for bars, optimum in zip(axes.containers, optima.values(), strict=True):
        np.testing.assert_allclose([bar.get_height() for bar in bars], optimum.policy - Q)
    assert [text.get_text() for text in axes.get_xticklabels()][::5] == ["q = 0.36\nA = -0.8", "q = 0.04\nA = 1.2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(NAMES.values())


def test_negative_numbers_are_not_taken_for_options(tmp_path, capsys):
    out = tmp_path / "two.png"
    main(["toy", "--advantages", "-.8", "-1e-3", "-2E0", "--q", ".5", "3e-1", ".2", "--out", str(out)])
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[2:4]] for line in printed.splitlines() if "│" in line]
    assert rows[:3] == [["0.500", "-0.8"], ["0.300", "-0.001"], ["0.200", "-2"]]
    assert out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--q 1 --advantages 1", r"--q=1: at least two"),
        ("--q 0 1 --advantages 1 2", r"--q=0 1: every probability must be above 0"),
        ("--q -.5 1.5 --advantages 1 2", r"--q=-0.5 1.5: every probability must be above 0"),
        ("--q nan .5 --advantages 1 2", r"--q=nan 0.5: every probability must be above 0"),
        ("--q .5 .50001 --advantages 1 2", r"--q=0.5 0.50001: the probabilities must sum to 1, not to 1.00001"),
        ("--q .5 .5", r"--advantages=-0.8 0.8 -1 1 -1 1.2: 2 are needed, one for each of --q=0.5 0.5"),
        ("--advantages 1 -inf 1 1 1 1", r"--advantages=1 -inf 1 1 1 1: every advantage must be a number"),
        ("--epsilon 0", r"--epsilon=0: the budget must be"),
        ("--epsilon -.1", r"--epsilon=-0.1: the budget must be"),
        ("--epsilon inf", r"--epsilon=inf: the budget must be"),
        ("--epsilon nan", r"--epsilon=nan: the budget must be"),
        ("--out nowhere/toy.png", r"--out='nowhere/toy.png': there is no folder 'nowhere'"),
        ("--out toy.pdf", r"--out='toy.pdf': .* must end in .png"),
    ],
)
def test_bad_input_is_named(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        main(["toy", *options.split()])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_probabilities_that_nearly_sum_to_1_are_made_to(tmp_path, capsys):
    main(["toy", "--q", "0.3333333", "0.6666666", "--advantages", "1", "1", "--out", str(tmp_path / "toy.png")])
    gap = next(line for line in capsys.readouterr().out.splitlines() if "solver gap, π" in line)
    assert all(float(cell) < 1e-12 for cell in gap.split("│")[4:7])
