r"""Corrections for the gap between the two policies that others use: each weighs or drops samples.

DC-GRPO moves the policy instead, and composes with them. All are constants of the loss, taken from the ratio of the two
policies for the weights that sampled, :math:`\rho_t = \pi_{train,old}(o_t) / \pi_{inf,old}(o_t)`. Each takes

- ``log_ratio``: :math:`\log \rho_t` of each response token. (R,) float32
- ``lengths``: tokens of each response. (B,) int64

and returns a weight for each token, (R,) float32, and which tokens to keep, (R,) bool. A token that is dropped leaves
the numerator and the denominator of the loss.

No two of them have an option of the same name: a config that puts one in the place of another keeps the values of such.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dclightning.ragged import segment_max, segment_mean, segment_sum, spread


class Correction(ABC):
    """One correction; several can be stacked. One of your own needs ``__call__`` only."""

    weighs: ClassVar[bool] = False
    """Whether it gives weights other than 1. Of these only one can be used: two would weigh by the ratio twice."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Weight of each token, and which tokens to keep; see the module's description."""


@dataclass(frozen=True)
class TokenTIS(Correction):
    r"""Truncated importance sampling: the weight :math:`\min(\rho_t, cap)`."""

    weighs: ClassVar[bool] = True

    cap: float = 2.0
    """Largest weight."""

    def __post_init__(self) -> None:
        _check_positive(self, "cap")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Weights; all tokens are kept."""
        return log_ratio.clamp(max=math.log(self.cap)).exp(), _all(log_ratio)


@dataclass(frozen=True)
class SequenceTIS(Correction):
    r"""Truncated importance sampling of whole responses: the weight :math:`\min(\prod_t \rho_t, cap)`."""

    weighs: ClassVar[bool] = True

    product_cap: float = 2.0
    """Largest weight."""

    def __post_init__(self) -> None:
        _check_positive(self, "product_cap")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Weights; all tokens are kept."""
        product = segment_sum(log_ratio, lengths).clamp(max=math.log(self.product_cap)).exp()
        return spread(product.float(), lengths), _all(log_ratio)


@dataclass(frozen=True)
class TokenMIS(Correction):
    r"""Masked importance sampling (IcePop): the weight :math:`\rho_t` within bounds; tokens outside are dropped."""

    weighs: ClassVar[bool] = True

    low: float = 0.5
    """Smallest ratio that is kept."""
    high: float = 5.0
    """Largest ratio that is kept."""

    def __post_init__(self) -> None:
        _check_bounds(self, "low", "high")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, and the tokens within the bounds."""
        keep = _within(log_ratio.double(), self.low, self.high)
        return log_ratio.where(keep, 0.0).exp(), keep


@dataclass(frozen=True)
class SequenceMIS(Correction):
    r"""Masked importance sampling of whole responses: the weight :math:`\prod_t \rho_t` within bounds, else dropped."""

    weighs: ClassVar[bool] = True

    product_low: float = 0.5
    """Smallest product that is kept."""
    product_high: float = 5.0
    """Largest product that is kept."""

    def __post_init__(self) -> None:
        _check_bounds(self, "product_low", "product_high")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, and the tokens of the responses within the bounds."""
        product = segment_sum(log_ratio, lengths)
        keep = _within(product, self.product_low, self.product_high)
        return spread(product.where(keep, 0.0).exp().float(), lengths), spread(keep, lengths)


@dataclass(frozen=True)
class GeometricMask(Correction):
    r"""Keeps the responses whose geometric mean :math:`\exp(mean_t \log \rho_t)` lies within bounds."""

    mean_low: float = 0.999
    """Smallest mean that is kept."""
    mean_high: float = 1.001
    """Largest mean that is kept."""

    def __post_init__(self) -> None:
        _check_bounds(self, "mean_low", "mean_high")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the responses within the bounds; the weight is 1."""
        keep = _within(segment_mean(log_ratio, lengths), self.mean_low, self.mean_high)
        return torch.ones_like(log_ratio), spread(keep, lengths)


@dataclass(frozen=True)
class Veto(Correction):
    r"""Drops the responses of which any token has :math:`\rho_t` below the threshold."""

    min_ratio: float = 1e-4
    """Smallest ratio that is tolerated."""

    def __post_init__(self) -> None:
        _check_positive(self, "min_ratio")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the responses that are left; the weight is 1."""
        keep = segment_max(-log_ratio, lengths) <= -math.log(self.min_ratio)
        return torch.ones_like(log_ratio), spread(keep, lengths)


@dataclass(frozen=True)
class TrustRegionMask(Correction):
    r"""Drops the responses of which any token's KL estimate :math:`\rho_t - 1 - \log \rho_t` exceeds the threshold.

    (arXiv 2512.23075; the estimate is of :math:`KL(\pi_{inf} \| \pi_{train})`.)
    """

    max_kl: float = 0.05
    """Largest estimate that is tolerated, in nats."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_kl")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the responses that are left; the weight is 1."""
        gap = log_ratio.double()
        keep = segment_max(gap.expm1() - gap, lengths) <= self.max_kl
        return torch.ones_like(log_ratio), spread(keep, lengths)


@torch.no_grad()
def corrected(corrections: Sequence[Correction], log_ratio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """All corrections together: the product of their weights, and the tokens that every one of them keeps.

    Each looks at the ratios as they are, whatever the others drop: their order changes nothing.

    Args:
        corrections: Any number; with none of them all weights are 1 and all tokens are kept.
        log_ratio: Log-ratio of the two policies of each response token. (R,)
        lengths: Tokens of each response. (B,) int64

    Returns:
        Weights, (R,) float32, and the tokens to keep, (R,) bool.
    """
    weights, keep = torch.ones_like(log_ratio), _all(log_ratio)
    for correction in corrections:
        more_weights, more_keep = correction(log_ratio, lengths)
        if more_weights.shape != log_ratio.shape or more_keep.shape != log_ratio.shape:
            raise ValueError(f"{type(correction).__name__}: must return two tensors with a number for each token")
        weights, keep = weights * more_weights, keep & more_keep
    return weights, keep


def check_corrections(corrections: Sequence[Correction], ratio_is_used: bool) -> None:
    """Refuse to weigh by the ratio twice; raises ValueError.

    Args:
        corrections: Those to be stacked.
        ratio_is_used: Whether the loss has the inference policy in its own ratio.
    """
    weighing = [type(correction).__name__ for correction in corrections if correction.weighs]
    if ratio_is_used and weighing:
        raise ValueError(f"corrections: {weighing[0]} weighs by a ratio that the loss has in it already; drop it")
    if len(weighing) > 1:
        raise ValueError(f"corrections: {' and '.join(weighing)} both weigh by the same ratio; keep one of them")


def _all(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def _within(log_values: Tensor, low: float, high: float) -> Tensor:
    return (log_values >= (math.log(low) if low > 0 else -math.inf)) & (log_values <= math.log(high))


def _check_positive(correction: Any, name: str) -> None:
    if not (value := getattr(correction, name)) > 0:
        raise ValueError(f"{type(correction).__name__}.{name}={value}: must be positive")


def _check_bounds(correction: Any, low: str, high: str) -> None:
    if not 0 <= getattr(correction, low) < getattr(correction, high):
        values = f"{low}={getattr(correction, low)}, {high}={getattr(correction, high)}"
        raise ValueError(f"{type(correction).__name__}: {values}: must not be negative, {low} being the smaller")
