"""The policy loss: a clipped surrogate for each token, and how tokens are weighed against each other."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "sequence-sum-norm"]


@dataclass(frozen=True)
class PolicyLoss:
    """What the update maximises (paper, section 3)."""

    clip_low: float = 0.2
    """The ratio may fall to 1 - clip_low before a token with a negative advantage stops counting."""
    clip_high: float = 0.24
    """The ratio may rise to 1 + clip_high before a token with a positive advantage stops counting."""
    aggregation: Aggregation = "token"
    """``token``: mean over the tokens of an optimizer step; ``sequence``: mean over each response, then over responses
    (the original GRPO); ``sequence-sum-norm``: sum over each response divided by ``norm_length`` (Dr. GRPO)."""
    norm_length: int = 8192
    """The constant of ``sequence-sum-norm``, in tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low={self.clip_low}: must be at least 0 and below 1")
        if self.clip_high < 0:
            raise ValueError(f"clip_high={self.clip_high}: must be at least 0")
        if self.norm_length < 1:
            raise ValueError(f"norm_length={self.norm_length}: must be at least 1")


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Ratio of the token's probability to the one before the step's first update; any shape.

    Beyond e^20 it is constant, so that neither the ratio nor its gradient can overflow.
    """
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's objective of each token, ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, to be maximised."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Which tokens the clip has cut off from the gradient; bool, same shape."""
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def token_weights(lengths: Tensor, loss: PolicyLoss, tokens: Tensor, responses: Tensor) -> Tensor:
    """The weight of each token's objective, so that the loss of an optimizer step is ``-sum(weight * objective)``.

    The denominators are those of the whole optimizer step, however it is cut into micro-batches and spread over
    ranks.

    Args:
        lengths: Tokens of each response at hand. (B,) int64
        loss: Says how to aggregate.
        tokens: Response tokens of the optimizer step, on all ranks. scalar
        responses: Responses of the optimizer step that have any token, on all ranks. scalar

    Returns:
        Weights of the response tokens, (R,) float32.
    """
    responses, scale = responses.float().clamp(min=1), torch.ones_like(lengths, dtype=torch.float32)
    if loss.aggregation == "token":
        weights = scale / tokens.float().clamp(min=1)
    elif loss.aggregation == "sequence":
        weights = scale / (responses * lengths)
    else:
        weights = scale / (responses * loss.norm_length)
    return weights.repeat_interleave(lengths)
