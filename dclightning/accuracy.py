"""How good a policy is on a benchmark: avg@k, pass@k and maj@k of each problem, and their means with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


def avg_at_k(correct: Tensor) -> Tensor:
    """The share of right responses to each problem.

    Args:
        correct: Of k responses to P problems. (P, k) bool, or rewards

    Returns:
        (P,) float64
    """
    return correct.double().mean(-1)


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """The probability that one of k responses is right, without bias from n ≥ k of them.

    1 − C(n − c, k) / C(n, k) with c of n responses right: Chen et al., https://arxiv.org/abs/2107.03374, equation 1.

    Args:
        correct: (P, n) bool
        k: At most n.

    Returns:
        (P,) float64

    Raises:
        ValueError: If there are fewer than k responses.
    """
    n = correct.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be from 1 to the number of responses, {n}")
    wrong = n - correct.sum(-1).double()
    draws = torch.arange(k, dtype=torch.float64)
    return 1 - ((wrong[:, None] - draws).clamp(min=0) / (n - draws)).prod(-1)


def maj_at_k(correct: Tensor, classes: Tensor) -> Tensor:
    """Whether the answer that most of k responses give is right; of answers as frequent, the share of right ones.

    Args:
        correct: (P, k) bool
        classes: Equal answers to a problem have the same number; a response without an answer has -1. (P, k) int64

    Returns:
        (P,) float64
    """
    same = (classes[:, :, None] == classes[:, None, :]) & (classes >= 0)[:, :, None]
    votes = same.sum(-1)
    winning = ((votes == votes.max(-1, keepdim=True).values) & (votes > 0)).double()
    per_class = winning / votes.clamp(min=1)  # each class counts once, however many responses are in it
    return (per_class * correct).sum(-1) / per_class.sum(-1).clamp(min=1)


def interval(values: Sequence[float] | Tensor, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """A bootstrap interval of the mean over problems (percentiles of 9,999 means of problems drawn again).

    Args:
        values: One for each problem. (P,)
        confidence: The probability that the interval is to have.
        seed: Decides the draws.

    Returns:
        Its ends; NaN for fewer than two problems.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return float("nan"), float("nan")
    found = bootstrap(
        (numbers,),
        np.mean,
        confidence_level=confidence,
        method="percentile",
        batch=500,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


class ProblemMeans(Metric):
    """Means over problems of named values, each with an interval; exact over ranks, however problems are spread.

    Args:
        names: Of the values.
    """

    full_state_update = False
    values: list[Tensor]

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(**options)
        self.names = names
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: dict[str, Tensor]) -> None:
        """Add some problems: by each name one value for each of them, (P,)."""
        self.values.append(torch.stack([values[name].double() for name in self.names], dim=-1))

    def compute(self) -> dict[str, tuple[float, float, float]]:
        """By name the mean and the ends of its interval; NaN without any problem."""
        table = dim_zero_cat(self.values).cpu() if len(self.values) else torch.empty(0, len(self.names))
        # Sorted, for which rank had which problem must not matter.
        columns = table.sort(dim=0).values.unbind(-1)
        return {
            name: (float(column.mean()), *interval(column)) for name, column in zip(self.names, columns, strict=True)
        }
