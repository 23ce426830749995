r"""Policy losses: for each token an objective to be maximised, and whether its trust region has cut it off.

All of them take the same tensors. With the ratio :math:`r_t = \pi_\theta(o_t) / \pi_{train,old}(o_t)` and the token's
advantage :math:`\hat A_t`, which already carries the penalty:

- ``logprobs``: :math:`\log \pi_\theta(o_t)`; a gradient flows to it, and to nothing else. (R,) float32
- ``old_logprobs``: :math:`\log \pi_{train,old}(o_t)`. (R,) float32
- ``rollout_logprobs``: :math:`\log \pi_{inf,old}(o_t)`, as sampled. (R,) float32
- ``advantages``: :math:`\hat A_t`. (R,) float32
- ``lengths``: tokens of each response; the responses stand one after another, whole. (B,) int64

They return the objective of each token, (R,) float32, and the side on which the trust region has cut off its gradient:
-1 where the ratio has become too low, 1 where too high, 0 where the gradient is whole. (R,) int8

Ratios beyond e^20 and below e^-20 are constant, so that neither they nor their gradients can overflow.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dclightning.ragged import segment_mean, segment_sum, spread

Aggregation = Literal["token", "sequence", "sequence-sum-norm"]


class PolicyLoss(ABC):
    """What the update maximises. A loss of your own needs ``objective`` only."""

    uses_inference_ratio: ClassVar[bool] = False
    """Whether the ratio is to the inference policy already, so that no correction may weigh by it once more."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and cut side of each token; see the module's description."""
        constants = old_logprobs.detach(), rollout_logprobs.detach(), advantages.detach()
        outputs = self.objective(logprobs, *constants, lengths)
        if len(outputs) != 2 or any(output.shape != logprobs.shape for output in outputs):
            raise ValueError(f"{type(self).__name__}.objective: must return two tensors with a number for each token")
        return outputs

    @abstractmethod
    def objective(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and cut side of each token, of constants without a graph."""


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    r"""PPO's clip: :math:`\min(r_t \hat A_t, clip(r_t, 1 - low, 1 + high) \hat A_t)` (the paper's loss)."""

    clip_low: float = 0.2
    """The ratio may fall to 1 - clip_low before a token with a negative advantage stops counting."""
    clip_high: float = 0.24
    """The ratio may rise to 1 + clip_high before a token with a positive advantage stops counting."""
    dual_clip: float | None = None
    """With a negative advantage the ratio may rise to this before the token stops counting (dual-clip PPO)."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(f"dual_clip={self.dual_clip}: must be above 1 + clip_high={1 + self.clip_high:g}")

    def objective(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and cut side of each token."""
        ratio = probability_ratio(logprobs, old_logprobs)
        objective, side = _clip(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            beyond = (advantages < 0) & (ratio > self.dual_clip)
            objective, side = torch.where(beyond, floor, objective), side.masked_fill(beyond, 1)
        return objective, side


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    r"""PPO's clip on the ratio of the whole response, :math:`s_i = \exp(mean_t \log r_t)`.

    In the form for token advantages: the value of a token's ratio is :math:`s_i`, its gradient
    :math:`s_i \nabla \log \pi_\theta(o_t)`. With ``aggregation="sequence"`` and one advantage for a whole response this
    is the sequence form (arXiv 2507.18071). In the mean, :math:`\log r_t` is held within 20 of zero.
    """

    # Not named as PPOClip's: a command line that changes the loss keeps the values of options of the same name.
    sequence_clip_low: float = 3e-4
    """As for PPO's clip, of the ratio of the response."""
    sequence_clip_high: float = 4e-4
    """As for PPO's clip, of the ratio of the response."""

    def __post_init__(self) -> None:
        _check_clip(self.sequence_clip_low, self.sequence_clip_high, "sequence_")

    def objective(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and cut side of each token."""
        mean = segment_mean(_log_ratio(logprobs.detach(), old_logprobs), lengths)
        ratio = spread(mean.exp().float(), lengths) * (logprobs - logprobs.detach()).exp()
        return _clip(ratio, advantages, self.sequence_clip_low, self.sequence_clip_high)


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    r"""A clipped weight instead of a clipped objective: :math:`sg[clip(r_t, low, high)] \hat A_t \log \pi_\theta(o_t)`.

    No token loses its gradient; the cut side tells where the weight was clipped (arXiv 2506.13585).
    """

    ratio_low: float = 0.0
    """Smallest weight of a token."""
    ratio_high: float = 5.0
    """Largest weight of a token."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(
                f"ratio_low={self.ratio_low}, ratio_high={self.ratio_high}: must lie around 1, and not be negative"
            )

    def objective(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and clipped side of each token."""
        ratio = probability_ratio(logprobs.detach(), old_logprobs)
        side = (ratio > self.ratio_high).to(torch.int8) - (ratio < self.ratio_low).to(torch.int8)
        return ratio.clamp(self.ratio_low, self.ratio_high) * advantages * logprobs, side


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    r"""A trust region in probability, around the inference policy: binary total variation.

    With :math:`p = \pi_\theta(o_t)` and :math:`q = \pi_{inf,old}(o_t)` the objective is :math:`(p / q) \hat A_t`.
    A token is dropped once :math:`p - q > threshold` and its advantage is positive, or :math:`p - q < -threshold` and
    its advantage is negative. The ratio is to the inference policy itself, so that a correction that weighs by it as
    well is refused.
    """

    uses_inference_ratio: ClassVar[bool] = True

    threshold: float = 0.2
    """How far a token's probability may move from that under the inference policy."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}: must be above 0 and at most 1")

    def objective(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Objective and cut side of each token."""
        moved = logprobs.detach().exp() - rollout_logprobs.exp()
        too_high = (advantages > 0) & (moved > self.threshold)
        too_low = (advantages < 0) & (moved < -self.threshold)
        objective = probability_ratio(logprobs, rollout_logprobs) * advantages
        return objective.masked_fill(too_high | too_low, 0.0), too_high.to(torch.int8) - too_low.to(torch.int8)


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Ratio of a token's probability under two policies, constant beyond e^20 and below e^-20; any shape."""
    return _log_ratio(logprobs, old_logprobs).exp()


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """How far the policy has moved: ``r - 1 - log r``, which on average is KL(old || new); any shape."""
    gap = _log_ratio(logprobs, old_logprobs)
    return gap.expm1() - gap


def token_weights(
    lengths: Tensor, keep: Tensor, tokens: Tensor, responses: Tensor, aggregation: Aggregation, norm_length: int = 1
) -> Tensor:
    """The weight of each token's objective, so that the loss of an optimizer step is ``-sum(weight * objective)``.

    ``token``: the mean over the kept tokens of the step; ``sequence``: the mean over the kept tokens of each response,
    then over the responses that have any (the original GRPO); ``sequence-sum-norm``: the sum over the kept tokens of
    each response divided by ``norm_length``, then the mean over the responses that have any (Dr. GRPO).

    The denominators are those of the whole optimizer step, however it is cut into micro-batches and spread over
    ranks. Tokens that are not kept leave the numerator and the denominator alike.

    Args:
        lengths: Tokens of each response at hand. (B,) int64
        keep: Which tokens take part. (R,) bool
        tokens: Kept tokens of the optimizer step, on all ranks. scalar
        responses: Responses of the optimizer step with a kept token, on all ranks. scalar
        aggregation: Which of these.
        norm_length: The constant of ``sequence-sum-norm``, in tokens.

    Returns:
        Weights, (R,) float32; 0 for tokens that are not kept.
    """
    responses = responses.double().clamp(min=1)
    if aggregation == "token":
        weights = torch.ones_like(lengths, dtype=torch.float64) / tokens.double().clamp(min=1)
    elif aggregation == "sequence":
        weights = 1 / (responses * segment_sum(keep, lengths).clamp(min=1))
    else:
        weights = torch.ones_like(lengths, dtype=torch.float64) / (responses * norm_length)
    return (spread(weights, lengths) * keep).float()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-20, 20)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    # The same as min(r A, clip(r) A), whose gradient is halved where rounding makes the two equal.
    too_high, too_low = (advantages > 0) & (ratio > 1 + high), (advantages < 0) & (ratio < 1 - low)
    bound = torch.where(too_high, ratio.new_full((), 1 + high), ratio.masked_fill(too_low, 1 - low))
    return bound * advantages, too_high.to(torch.int8) - too_low.to(torch.int8)


def _check_clip(low: float, high: float, prefix: str = "") -> None:
    if not 0 <= low < 1:
        raise ValueError(f"{prefix}clip_low={low}: must be at least 0 and below 1")
    if not high >= 0:
        raise ValueError(f"{prefix}clip_high={high}: must be at least 0")
