r"""The best policy in a single state under each of the three discrepancies (paper, Appendix B).

The state has n actions with advantages :math:`A` and probabilities :math:`q` under the inference policy. Wanted is

.. math:: \max_\pi \sum_a \pi_a A_a \quad\text{with}\quad \sum_a \pi_a = 1,\ \pi \ge 0,\ E_q[\delta^2] \le \epsilon

where :math:`\delta` compares :math:`\pi` with :math:`q` in one of the ways of :mod:`dclightning.discrepancy`. With the
multipliers :math:`\lambda` of the budget and :math:`\nu` of the simplex, and :math:`k = (A - \nu) / 2\lambda`, it is

- ``probability``: :math:`\pi = [q + k / q]_+`
- ``ratio``: :math:`\pi = q [1 + k]_+`
- ``log``: :math:`\pi = q x` with :math:`\log x = k x`, that is :math:`x = e^{-W(-k)}` with Lambert's W

The log budget is convex up to :math:`x = e` only. There W is its principal branch; an action beyond e is on the other
one. That needs :math:`q < \epsilon`, as such an action spends more than q. It need not be the action with the largest
advantage: a rarer one is cheaper to raise.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize
from scipy.special import expit, lambertw, logit

if TYPE_CHECKING:
    from dclightning.discrepancy import DiscrepancyKind

Vector = NDArray[np.float64]

KINDS: tuple["DiscrepancyKind", ...] = ("probability", "ratio", "log")
_PEAK = np.nextafter(1 / np.e, 0)  # the largest k, that of x = e; just there SciPy's W is NaN
_ZERO = 1e-15  # stands for a probability of 0 under the log budget, which 0 itself always breaks
_SCAN = 32  # points between which the maxima beyond e are looked for


@dataclass(frozen=True)
class OptimalPolicy:
    """The best policy within a budget.

    Attributes:
        policy: Probabilities of the actions, (n,).
        multiplier: λ of the budget, in units of advantage per unit of budget; 0 where the budget does not bind.
        nu: ν of the simplex, in units of advantage: while the budget binds, actions above it gain, those below lose.
        expected_advantage: Σ π A.
        spent: The budget used, E_q[δ²].
    """

    policy: Vector
    multiplier: float
    nu: float
    expected_advantage: float
    spent: float


def budget_spent(policy: Vector, q: Vector, kind: "DiscrepancyKind") -> float:
    """E_q[δ²] of a policy, which must be positive for ``log``; both (n,)."""
    if kind == "probability":
        return float(q @ (policy - q) ** 2)
    if kind == "ratio":
        return float(q @ (policy / q - 1) ** 2)
    return float(q @ np.log(policy / q) ** 2)


def optimal_policy(q: Vector, advantages: Vector, epsilon: float, kind: "DiscrepancyKind") -> OptimalPolicy:
    """The best policy within a budget, by the closed forms above.

    Where all advantages are equal, it is q. For ``log``, it is the best policy in which at most one action has x > e.
    An optimum can have two, if their q sum to less than ε; none of those that were met had all q above 1e-3.

    Args:
        q: Probabilities under the inference policy, all positive, summing to 1, (n,) with n >= 2.
        advantages: One of each action, finite, (n,).
        epsilon: The budget, at least 1e-12: of less, rounding leaves nothing.
        kind: The discrepancy that is squared.
    """
    greedy = _greedy(q, advantages, kind)
    if budget_spent(greedy, q, kind) <= epsilon * (1 + 1e-12):
        return _result(greedy, q, advantages, kind, 0.0, advantages.max())
    gap = advantages.max() - advantages
    candidates = []
    if (found := _multipliers(q, gap, 1.0, epsilon, kind)) is not None:
        scale, top = found
        policy = _policy(q, top - scale * gap, kind)
        candidates.append(_result(policy, q, advantages, kind, 0.5 / scale, advantages.max() - top / scale))
    if kind == "log":
        for action in np.flatnonzero((q < min(epsilon, 1 / np.e)) & (advantages > advantages.min())):
            candidates += _beyond_e(q, advantages, epsilon, int(action))
    return max(candidates, key=lambda candidate: candidate.expected_advantage)


def ratio_support_limit(q: Vector, advantages: Vector) -> float:
    """The budget below which, and only there, the ``ratio`` policy keeps every action: Var_q A / (E_q A - min A)²."""
    if advantages.min() == advantages.max():
        return float("inf")
    mean = q @ advantages
    return float(q @ (advantages - mean) ** 2 / (mean - advantages.min()) ** 2)


def _greedy(q: Vector, advantages: Vector, kind: "DiscrepancyKind") -> Vector:
    """All probability on the actions with the largest advantage, in the way that spends least."""
    best = advantages == advantages.max()
    if kind == "probability":
        return np.where(best, q + (1 - q[best].sum()) / (q * np.sum(1 / q[best])), 0.0)
    return np.where(best, q / q[best].sum(), _ZERO if kind == "log" else 0.0)


def _policy(q: Vector, k: Vector, kind: "DiscrepancyKind") -> Vector:
    """The closed forms; that of ``log`` on the principal branch, with x held at e where k is too large for it."""
    if kind == "probability":
        return np.maximum(q + k / q, 0.0)
    if kind == "ratio":
        return np.maximum(q * (1 + k), 0.0)
    x: Vector = np.exp(-lambertw(-np.minimum(k, _PEAK)).real)
    return q * x


def _multipliers(
    q: Vector, gap: Vector, mass: float, budget: float, kind: "DiscrepancyKind"
) -> tuple[float, float] | None:
    """The multipliers with which some actions share a probability mass and spend a budget.

    They come as 1/2λ and as k of the best of these actions: from ν, k could not be told where λ is tiny.

    Args:
        q: Probabilities of these actions under the inference policy, (m,).
        gap: How far their advantages are below the best of them, (m,).
        mass: The probability that they share, for ``log`` at most that under q, else 1.
        budget: What they spend in total.
        kind: The discrepancy.

    Returns:
        1/2λ and k of the best; None if they cannot spend so much or so little.
    """
    share = mass / q.sum()
    even = np.log(share) / share  # k of all if each had the same share
    margin = 1e-6 * (1 + abs(even))
    worst = gap == gap.max()
    if worst.all():
        return None
    if kind == "log":
        x = (mass - np.e * q[~worst].sum()) / q[worst].sum()  # of the worst, if all others are held at e
        if x > 0 and q[~worst].sum() + q[worst].sum() * np.log(x) ** 2 <= budget:
            return None

    def top(scale: float) -> float:
        bracket = even - margin, even + scale * gap.max() + margin
        return float(
            brentq(lambda k: _policy(q, k - scale * gap, kind).sum() / mass - 1, *bracket, xtol=1e-18, maxiter=500)
        )

    def excess(log_scale: float) -> float:
        scale = np.exp(log_scale)
        spent = budget_spent(_policy(q, top(scale) - scale * gap, kind), q, kind)
        return float(np.log(max(spent, 1e-300) / budget))

    guess = float(np.log(np.sqrt(budget) / gap.max()))
    low = next((guess - step for step in range(0, 51, 3) if excess(guess - step) <= 0), None)
    high = next((guess + step for step in range(0, 51, 3) if excess(guess + step) >= 0), None)
    if low is None or high is None:
        return None
    scale = float(np.exp(brentq(excess, low, high, xtol=1e-14)))
    k = top(scale)
    # Where the best are held at e, k of the others can be the difference of two numbers too large to have one.
    return (scale, k) if abs(_policy(q, k - scale * gap, kind).sum() / mass - 1) < 1e-9 else None


def _beyond_e(q: Vector, advantages: Vector, epsilon: float, action: int) -> list[OptimalPolicy]:
    """The local maxima of the ``log`` form with x > e for one given action and x <= e for the others.

    Given the probability of this action, what the others do is a convex problem. A maximum is where the action meets
    its own condition, log(x) / x = k, and more probability gained before and loses behind.
    """
    rest = np.arange(len(q)) != action
    others, best = q[rest], advantages[rest].max()
    gap, lead = best - advantages[rest], advantages[action] - best

    # z is the logit of the action's probability, which tells both it and its complement exactly when they are small.
    def left(z: float) -> float:
        return float(epsilon - q[action] * np.log(expit(z) / q[action]) ** 2)

    def spare(z: float) -> float:
        return left(z) - float(others.sum() * np.log(expit(-z) / others.sum()) ** 2)

    def condition(z: float) -> float:
        if spare(z) <= 0:
            return 1.0
        if (found := _multipliers(others, gap, expit(-z), left(z), "log")) is None:
            return -1.0  # the others cannot use all that is left
        x = expit(z) / q[action]
        return float(np.log(x) / x - found[1] - found[0] * lead)

    start = float(logit(np.e * q[action]))
    if spare(start) <= 0:
        return []
    grid = np.linspace(start, brentq(spare, start, 50) + 1e-6, _SCAN)
    values = [condition(z) for z in grid]
    maxima = []
    for i in range(_SCAN - 1):
        if not values[i] < 0 < values[i + 1]:
            continue
        z = float(brentq(condition, grid[i], grid[i + 1], xtol=1e-14))
        if gap.max() == 0:  # no choice is left to the others, so that the budget ends at z
            x, share = expit(z) / q[action], expit(-z) / others.sum()
            top = float(np.log(share) / share)
            scale = float(np.log(x) / x - top) / lead
        elif (found := _multipliers(others, gap, expit(-z), left(z), "log")) is not None:
            scale, top = found
        else:
            continue
        policy = np.full(len(q), expit(z))
        policy[rest] = _policy(others, top - scale * gap, "log")
        maxima.append(_result(policy, q, advantages, "log", 0.5 / scale, best - top / scale))
    return maxima


def _result(
    policy: Vector, q: Vector, advantages: Vector, kind: "DiscrepancyKind", multiplier: float, nu: float
) -> OptimalPolicy:
    policy = policy / policy.sum()
    return OptimalPolicy(policy, multiplier, float(nu), float(policy @ advantages), budget_spent(policy, q, kind))


def solve_numerically(
    q: Vector, advantages: Vector, epsilon: float, kind: "DiscrepancyKind", starts: int = 8, seed: int = 0
) -> Vector:
    """The best policy within a budget by sequential quadratic programming: a check that uses no closed form.

    The unknowns are δ sqrt(q / ε), with the sign of the difference that δ is the size of. Each budget is then the unit
    ball. Starts are on its surface.

    Args:
        q: Probabilities under the inference policy, all positive, summing to 1, (n,) with n >= 2.
        advantages: One of each action, finite, (n,).
        epsilon: The budget, positive.
        kind: The discrepancy that is squared.
        starts: Random starts, besides those that spend all on raising one action.
        seed: Of the random starts.

    Returns:
        The best policy found, (n,).
    """
    unit: Vector = np.sqrt(epsilon / q)  # δ for an unknown of 1
    worth = advantages / max(float(np.ptp(advantages)), 1e-300)

    def policy(w: Vector) -> Vector:
        if kind == "probability":
            return q + unit * w
        if kind == "ratio":
            return q * (1 + unit * w)
        x: Vector = np.exp(unit * w)
        return q * x

    def slope(w: Vector) -> Vector:
        if kind == "probability":
            return unit
        return unit * (q if kind == "ratio" else policy(w))

    # Between these the policy is from 0 to 1; log, which has no 0, ends where the ball does.
    low, high = {"probability": (-q, 1 - q), "ratio": (-np.ones_like(q), 1 / q - 1), "log": (-unit, -np.log(q))}[kind]
    bounds = np.column_stack([low / unit, high / unit])
    constraints = (
        {"type": "eq", "fun": lambda w: policy(w).sum() - 1, "jac": slope},
        {"type": "ineq", "fun": lambda w: 1 - w @ w, "jac": lambda w: -2 * w},
    )
    points = np.random.default_rng(seed).normal(size=(starts, len(q)))
    points = np.vstack([np.eye(len(q)), points / np.linalg.norm(points, axis=1, keepdims=True)])
    best = q
    for point in points:
        w = minimize(
            lambda w: -policy(w) @ worth,
            np.clip(point, *bounds.T),
            jac=lambda w: -slope(w) * worth,
            bounds=bounds,
            constraints=constraints,
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-15},
        ).x
        if abs(policy(w).sum() - 1) < 1e-9 and w @ w < 1 + 1e-9 and policy(w) @ worth > best @ worth:
            best = policy(w)
    return best
