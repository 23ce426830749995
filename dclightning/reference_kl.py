"""A leash to the policy that training started from: the KL divergence to it, as a part of the loss."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dclightning.errors import check_choice
from dclightning.policy_loss import probability_ratio

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class ReferenceKL:
    """How much the divergence from the reference policy costs. The reference is the model as its files have it."""

    coefficient: float = 0.0
    """Weight of the divergence in the loss; 0 (the paper's choice) loads no reference."""
    estimator: Estimator = "k3"
    """What is reported; the gradient is the same."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"reference_kl.coefficient={self.coefficient}: must not be negative")
        check_choice("reference_kl.estimator", self.estimator, Estimator)


def reference_kl(
    logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator = "k3"
) -> Tensor:
    r"""Estimates :math:`KL(\pi_\theta \| \pi_{ref})` from tokens that :math:`\pi_{old}` sampled.

    With :math:`\ell = \log \pi_\theta - \log \pi_{ref}` and the ratio :math:`r = \pi_\theta / \pi_{old}`, the value
    is r times ``k1`` :math:`= \ell`, ``k2`` :math:`= \ell^2 / 2` or ``k3`` :math:`= e^{-\ell} - 1 + \ell`. On average
    k1 and k3 are the divergence; k2 is close to it while the policies are close.

    The gradient is :math:`r \ell \nabla \log \pi_\theta` for all three, which on average is the gradient of the
    divergence. Differentiating the estimators themselves would not give that: k1 alone has no gradient on average, k3
    alone that of another divergence.

    Args:
        logprobs: Under the policy that is trained; the gradient flows to it. (R,)
        old_logprobs: Under the policy that the tokens are taken to be sampled from. (R,)
        reference_logprobs: Under the reference policy. (R,)
        estimator: Which of the three.

    Returns:
        The estimates, (R,). Log-ratios beyond 20 count as 20, so that nothing overflows.
    """
    gap = (logprobs - reference_logprobs).detach().clamp(-20, 20)
    ratio = probability_ratio(logprobs, old_logprobs).detach()
    value = {"k1": gap, "k2": gap.square() / 2, "k3": (-gap).expm1() + gap}[estimator]
    return ratio * value + ratio * gap * (logprobs - logprobs.detach())
