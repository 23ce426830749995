r"""The discrepancy between the training policy and the inference policy, and what is said about it.

Everything here is a constant of the loss: no gradient flows through it. With :math:`p = \pi_{train}(o_t)` and
:math:`q = \pi_{inf}(o_t)`, both for the weights that sampled, each response token has a discrepancy
:math:`\delta_t` (paper, section 3.1).
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

DiscrepancyKind = Literal["probability", "ratio", "log"]


@torch.no_grad()
def discrepancy(old_logprobs: Tensor, rollout_logprobs: Tensor, kind: DiscrepancyKind = "probability") -> Tensor:
    r"""Discrepancy of each token.

    ``probability``: :math:`|p - q|`; ``ratio``: :math:`|p / q - 1|`; ``log``: :math:`|\log p - \log q|`.

    Args:
        old_logprobs: Log-probabilities under the training policy, any shape.
        rollout_logprobs: Log-probabilities under the inference policy, as sampled, same shape.
        kind: Which of the three.

    Returns:
        The discrepancies, float32, same shape.
    """
    p, q = old_logprobs.float(), rollout_logprobs.float()
    if kind == "probability":
        return (p.exp() - q.exp()).abs()
    if kind == "ratio":
        return torch.expm1(p - q).abs()
    if kind == "log":
        return (p - q).abs()
    raise ValueError(f"discrepancy kind {kind!r} is not one of {', '.join(get_args(DiscrepancyKind))}")


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each response, then over the responses that have any.

    Args:
        values: One number for each response token, the responses one after another. (R,)
        lengths: Tokens of each response; they sum to R. (B,) int64

    Returns:
        The mean, a float64 scalar; NaN if no response has a token.
    """
    filled = lengths[lengths > 0]
    if len(filled) == 0:
        return torch.full((), math.nan, dtype=torch.float64, device=values.device)
    # Unlike index_add this adds in the same order each time, on a GPU as well: every rank must get the same multiplier.
    return (torch.segment_reduce(values.double(), "sum", lengths=filled) / filled).mean()


def token_mean(values: Tensor) -> Tensor:
    """Mean over all tokens, a float64 scalar; NaN if there are none."""
    return values.double().mean()


def discrepancy_statistics(delta: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Means and tail of the discrepancies of a rollout, (R,), with the responses' lengths, (B,)."""
    return {
        "discrepancy/sequence_mean": sequence_mean(delta, lengths),
        "discrepancy/token_mean": token_mean(delta),
        "discrepancy/p99": _quantile(delta, 0.99),
        "discrepancy/max": delta.max(),
    }


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """The names under which other trainers report the mismatch, so that runs can be compared; both inputs (R,)."""
    gap = (old_logprobs - rollout_logprobs).double()
    difference = (old_logprobs.exp() - rollout_logprobs.exp()).abs()
    return {
        "rollout_corr/kl": -gap.mean(),
        "rollout_corr/k3_kl": (gap.expm1() - gap).mean(),
        "rollout_corr/chi2_token": torch.expm1(2 * gap).mean(),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_std": difference.std(correction=0),
    }


def _quantile(values: Tensor, q: float) -> Tensor:
    # torch.quantile refuses more than 16 million values.
    return values.kthvalue(max(1, round(q * values.numel()))).values
