"""What the discrepancy of a model and an engine is like with fixed weights: its distribution, where it is, a budget.

Pure functions of tensors of response tokens, (R,), the responses' lengths, (B,), and whole distributions.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression
from typing import Any, get_args

import torch
from torch import Tensor

from dclightning.accuracy import interval
from dclightning.discrepancy import DiscrepancyKind, discrepancy, quantile, sequence_mean
from dclightning.metrics import Mismatch
from dclightning.ragged import positions, segment_mean, segment_sum

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
ENTROPIES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, math.inf)
"""In nats."""


@dataclass(frozen=True)
class Tokens:
    """Response tokens with what both policies say of them, and the lengths of their responses."""

    logprobs: Tensor
    """Of the training policy. (R,)"""
    rollout_logprobs: Tensor
    """Of the inference policy. (R,)"""
    entropy: Tensor
    """Of the training policy's distributions, in nats. (R,)"""
    lengths: Tensor
    """(B,) int64"""
    groups: Tensor
    """Which prompt each response is to: responses to one are alike. (B,) int64"""

    def delta(self, kind: DiscrepancyKind) -> Tensor:
        """The discrepancies, (R,)."""
        return discrepancy(self.logprobs, self.rollout_logprobs, kind)


def describe(tokens: Tokens) -> dict[str, Any]:
    """All that is measured from sampled tokens, as plain numbers.

    ``by_position`` and ``by_length`` are in steps of a doubling. ``by_prefix`` is the log importance weight of the
    first n tokens, as the root of its mean square over the responses that are as long; ``growth`` the exponent with
    which that rises with n: 0.5 if tokens' gaps are independent of each other, 1 if they all point the same way.
    """
    mismatch = Mismatch(sync_on_compute=False)  # the tokens are those of all ranks
    mismatch.update(tokens.logprobs, tokens.rollout_logprobs)
    delta: dict[str, Tensor] = {kind: tokens.delta(kind) for kind in get_args(DiscrepancyKind)}
    place = positions(tokens.lengths)
    probability = tokens.rollout_logprobs.exp()
    longest = int(tokens.lengths.max())
    doublings = [0.0, *(float(2**n) for n in range(4, max(5, longest.bit_length() + 1)))]
    answered = tokens.lengths > 0
    of_responses = {kind: segment_mean(values, tokens.lengths)[answered] for kind, values in delta.items()}
    prefixes = _by_prefix(tokens)
    return {
        "responses": len(tokens.lengths),
        "tokens": len(place),
        "discrepancy": {kind: _distribution(values, tokens.lengths) for kind, values in delta.items()},
        "mismatch": {name: float(value) for name, value in mismatch.compute().items()},
        "by_position": _by(place.double(), doublings, delta),
        "by_probability": _by(probability, PROBABILITIES, delta),
        "by_entropy": _by(tokens.entropy, ENTROPIES, delta),
        "by_length": _by(tokens.lengths[answered].double(), doublings, of_responses),
        "by_prefix": prefixes,
        "growth": _growth(prefixes),
    }


def describe_divergences(divergences: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Mean and tail over positions of what :func:`~dclightning.discrepancy.divergences` found."""
    return {
        name: {
            "mean": float(values.mean()),
            **({} if "agreement" in name else {key: float(quantile(values, q)) for key, q in QUANTILES.items()}),
            **({"min": float(values.min())} if "agreement" in name else {"max": float(values.max())}),
        }
        for name, values in divergences.items()
    }


def propose(tokens: Tokens, kind: DiscrepancyKind, aggregation: str, slack: float) -> dict[str, float]:
    """A budget c for the multiplier: the floor, which is the mean with fixed weights, and some slack.

    Args:
        tokens: What was measured.
        kind: The discrepancy.
        aggregation: Its mean: ``sequence`` or ``token``.
        slack: As a share of the floor.

    Returns:
        ``floor``, with the ends ``low`` and ``high`` of a 95 % bootstrap interval over the prompts, and ``budget``.
    """
    delta, answered = tokens.delta(kind), tokens.lengths > 0
    # The floor as a mean of one number for each prompt, whose responses are no independent draws.
    if aggregation == "sequence":
        parts, weights = segment_mean(delta, tokens.lengths), answered.double()
    else:
        parts, weights = segment_sum(delta, tokens.lengths), tokens.lengths.double()
    _, prompts = tokens.groups.unique(return_inverse=True)
    sums = torch.zeros(int(prompts.max()) + 1, dtype=torch.float64)
    means = sums.index_add(0, prompts, parts) * (len(sums) / weights.sum())
    floor, (low, high) = float(means.mean()), interval(means)
    budget = float(f"{floor * (1 + slack):.3g}")
    return {"floor": floor, "low": low, "high": high, "slack": slack, "budget": budget}


def _distribution(delta: Tensor, lengths: Tensor) -> dict[str, float]:
    return {
        "sequence_mean": float(sequence_mean(delta, lengths)),
        "token_mean": float(delta.double().mean()),
        **{name: float(quantile(delta, q)) for name, q in QUANTILES.items()},
        "max": float(delta.max()),
    }


def _by(of: Tensor, edges: Any, values: dict[str, Tensor]) -> list[dict[str, float]]:
    """Means of what lies between neighbouring edges, the upper one excluded but for the last; empty bins left out."""
    rows = []
    for low, high in pairwise(edges):
        chosen = (of >= low) & ((of < high) | (high == edges[-1]))
        if chosen.any():
            means = {name: float(value[chosen].double().mean()) for name, value in values.items()}
            rows.append({"from": low, "to": high, "count": int(chosen.sum()), **means})
    return rows


def _by_prefix(tokens: Tokens) -> list[dict[str, float]]:
    """For 1, 2, 4, ... tokens, as long as ten responses have so many."""
    gaps, place = tokens.logprobs - tokens.rollout_logprobs, positions(tokens.lengths)
    rows: list[dict[str, float]] = []
    for count in (2**n for n in range(40)):
        longer = tokens.lengths >= count
        if longer.sum() < 10:
            return rows
        sums = segment_sum(torch.where(place < count, gaps, 0.0), tokens.lengths)[longer]
        rows.append({"tokens": count, "responses": int(longer.sum()), "log_weight": float(sums.square().mean().sqrt())})
    return rows


def _growth(prefixes: list[dict[str, float]]) -> float | None:
    """The slope of the log weight over the length, both in logs; None of fewer than three lengths."""
    points = [(math.log(row["tokens"]), math.log(row["log_weight"])) for row in prefixes if row["log_weight"] > 0]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 2 else None
