"""The constraint on the discrepancy: how it is charged to the advantages, and how its price moves."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor


def penalized_advantages(advantages: Tensor, penalty: Tensor) -> Tensor:
    r"""Token advantages :math:`\hat A_{i,t} = A_i - \lambda \delta_{i,t}` (paper, Eq. 8).

    The penalty comes after the group's normalisation, and nothing centres the result again.

    Args:
        advantages: The advantage of each token's response. (R,)
        penalty: What each token is charged, :math:`\lambda \delta_t`. (R,)
    """
    return advantages - penalty


def dual_ascent(multiplier: float, discrepancy: float, budget: float, lr: float, bounds: tuple[float, float]) -> float:
    r"""One projected step of the multiplier :math:`\lambda \leftarrow clip(\lambda + \eta (\bar\delta - c))`.

    Args:
        multiplier: :math:`\lambda_k`, the one that the step's advantages were computed with.
        discrepancy: The step's mean discrepancy :math:`\bar\delta`.
        budget: The discrepancy that is tolerated, c.
        lr: The dual learning rate :math:`\eta`.
        bounds: Smallest and largest multiplier.

    Returns:
        The next step's multiplier; the same one if the discrepancy is not finite.
    """
    if not math.isfinite(discrepancy):
        return multiplier
    low, high = bounds
    return min(max(multiplier + lr * (discrepancy - budget), low), high)


def running_budget(discrepancies: Sequence[float], quantile: float, slack: float) -> float:
    r"""A budget that follows the floor of what was measured: :math:`c = (1 + slack) \cdot Q_{quantile}(\bar\delta)`.

    This goes beyond the paper, whose budget is a constant.

    Args:
        discrepancies: Mean discrepancies of the latest steps, at least one.
        quantile: Which quantile of them is taken to be the floor, from 0 to 1.
        slack: What the budget is above the floor, as a share of it.
    """
    return (1 + slack) * float(np.quantile(discrepancies, quantile))
