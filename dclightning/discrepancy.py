r"""The discrepancy between the training policy and the inference policy, and what is said about it.

Everything here is a constant of the loss: no gradient flows through it. With :math:`p = \pi_{train}(o_t)` and
:math:`q = \pi_{inf}(o_t)`, both for the weights that sampled, each response token has a discrepancy
:math:`\delta_t` (paper, section 3.1).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from dclightning.errors import check_choice
from dclightning.ragged import segment_mean

DiscrepancyKind = Literal["probability", "ratio", "log"]


@torch.no_grad()
def discrepancy(old_logprobs: Tensor, rollout_logprobs: Tensor, kind: DiscrepancyKind = "probability") -> Tensor:
    r"""Discrepancy of each token.

    ``probability``: :math:`|p - q|`; ``ratio``: :math:`|p / q - 1|`, where p / q beyond e^20 counts as e^20, so that
    nothing overflows; ``log``: :math:`|\log p - \log q|`.

    Args:
        old_logprobs: Log-probabilities under the training policy, any shape.
        rollout_logprobs: Log-probabilities under the inference policy, as sampled, same shape.
        kind: Which of the three.

    Returns:
        The discrepancies, float32, same shape.
    """
    check_choice("discrepancy", kind, DiscrepancyKind)
    p, q = old_logprobs.float(), rollout_logprobs.float()
    if kind == "probability":
        return (p.exp() - q.exp()).abs()
    if kind == "ratio":
        return torch.expm1((p - q).clamp(max=20)).abs()
    return (p - q).abs()


def divergences(train: Tensor, inference: Tensor, top: int = 10) -> dict[str, Tensor]:
    r"""How far whole distributions are apart, exactly, where the discrepancy has only the sampled tokens.

    ``kl`` is :math:`KL(\pi_{inf} \| \pi_{train})`, whose estimate from sampled tokens is ``rollout_corr/kl``;
    ``reverse_kl`` the other way round; ``total_variation`` half the sum of :math:`|\pi_{train} - \pi_{inf}|`;
    ``top1_agreement`` whether the likeliest token is the same; ``top{k}_agreement`` which share of the k likeliest is.

    Args:
        train: Log-probabilities under the training policy. (N, V)
        inference: Under the inference policy. (N, V)
        top: k.

    Returns:
        By name one number for each position, (N,) float64.
    """
    log_p, log_q = train.double().log_softmax(-1), inference.double().log_softmax(-1)  # exact to the last digit
    p, q = log_p.exp(), log_q.exp()
    best = [log.topk(min(top, log.shape[-1])).indices for log in (log_p, log_q)]
    same = (best[0][:, :, None] == best[1][:, None, :]).any(-1)
    return {
        "kl": torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1),
        "reverse_kl": torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1),
        "total_variation": (p - q).abs().sum(-1) / 2,
        "top1_agreement": (best[0][:, 0] == best[1][:, 0]).double(),
        f"top{top}_agreement": same.double().mean(-1),
    }


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each response, then over the responses that have any (paper, section 5).

    Args:
        values: One number for each response token, the responses one after another. (R,)
        lengths: Tokens of each response; they sum to R. (B,) int64

    Returns:
        The mean, a float64 scalar; NaN if no response has a token.
    """
    # Summed in the same order each time, on a GPU as well: every rank must get the same multiplier.
    return segment_mean(values, lengths).sum() / (lengths > 0).sum()


def token_mean(values: Tensor) -> Tensor:
    """Mean over all tokens, a float64 scalar; NaN if there are none."""
    return values.double().mean()


def quantile(values: Tensor, q: float) -> Tensor:
    """The smallest of some numbers that at least a share q of them does not exceed; a scalar."""
    # torch.quantile refuses more than 16 million values, and kthvalue is not deterministic on a GPU.
    return values.sort().values[max(1, math.ceil(q * values.numel() - 1e-9)) - 1]
