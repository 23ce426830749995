"""What is measured in a training step, as TorchMetrics: exact over micro-batches and ranks, however tokens are spread.

Each is updated with tensors of response tokens, (R,), as often as there are micro-batches, and computes a dictionary
of named float64 scalars that is the same on every rank. Sums are in float64. Every rank has to update before it
computes, if with tensors of no token.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from dclightning.discrepancy import quantile, sequence_mean, token_mean
from dclightning.ragged import positions, spread

EDGE = 16
"""Tokens at the beginning and at the end of a response whose discrepancy is told apart."""


class Means(Metric):
    """Means of named numbers, each over its own count; a name without any number has no mean and is left out.

    Args:
        names: In the order in which they are reported.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(**options)
        self.places = {name: place for place, name in enumerate(names)}
        self.add_state("total", torch.zeros(len(names), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: dict[str, Tensor]) -> None:
        """Add numbers, of any shape and number type, under their names."""
        for name, numbers in values.items():
            self.total[self.places[name]] += numbers.double().sum()
            self.count[self.places[name]] += numbers.numel()

    def compute(self) -> dict[str, Tensor]:
        """The mean under each name."""
        means = (self.total / self.count).unbind()
        return {name: mean for name, mean, n in zip(self.places, means, self.count.tolist(), strict=True) if n}


class Discrepancy(Metric):
    """Means and tail of the discrepancies, and where in the responses they are.

    The quantiles are those of all tokens of all ranks: the tokens themselves are kept and gathered.
    """

    full_state_update = False
    delta: list[Tensor]
    lengths: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("delta", [], dist_reduce_fx="cat")
        self.add_state("lengths", [], dist_reduce_fx="cat")

    def update(self, delta: Tensor, lengths: Tensor) -> None:
        """Add whole responses: their tokens' discrepancies, (R,), and how many tokens each has, (B,) int64."""
        self.delta.append(delta)
        self.lengths.append(lengths)

    def compute(self) -> dict[str, Tensor]:
        """Under ``discrepancy/``; empty without a token."""
        if len(self.delta) == 0:
            return {}
        return discrepancy_statistics(dim_zero_cat(self.delta), dim_zero_cat(self.lengths))


def discrepancy_statistics(delta: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """What is said of the discrepancies of a rollout, (R,), with the responses' lengths, (B,); empty without a token.

    ``first_16``, ``last_16`` and ``middle`` are token means; each token counts in one of them, the beginning first.
    """
    if len(delta) == 0:
        return {}
    statistics = {"sequence_mean": sequence_mean(delta, lengths), "token_mean": token_mean(delta)}
    statistics |= {f"p{percent}": quantile(delta, percent / 100) for percent in (50, 90, 99)}
    statistics["max"] = delta.max()
    place, length = positions(lengths), spread(lengths, lengths)
    first = place < EDGE
    last = ~first & (place >= length - EDGE)
    for name, chosen in ((f"first_{EDGE}", first), ("middle", ~first & ~last), (f"last_{EDGE}", last)):
        if chosen.any():
            statistics[name] = token_mean(delta[chosen])
    return {f"discrepancy/{name}": value.double() for name, value in statistics.items()}


class Mismatch(Metric):
    r"""The gap of the two policies under the names that other trainers use.

    With :math:`\Delta = \log \pi_{train,old} - \log \pi_{inf,old}`: ``rollout_corr/kl`` is the mean of
    :math:`-\Delta`, ``k3_kl`` of :math:`e^\Delta - \Delta - 1`, ``chi2_token`` of :math:`e^{2\Delta} - 1`, and
    ``training/rollout_probs_diff_{mean,max,std}`` are of :math:`|\pi_{train,old} - \pi_{inf,old}|`, the std over all
    tokens. ``rollout_corr/raw_eff_sample_size`` is the effective sample size that plain importance weights
    :math:`e^\Delta` would leave, as a share: :math:`(\sum e^\Delta)^2 / (R \sum e^{2\Delta})`.
    """

    full_state_update = False
    sums: Tensor
    largest: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("sums", torch.zeros(8, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, old_logprobs: Tensor, rollout_logprobs: Tensor) -> None:
        """Add the log-probabilities of response tokens, (R,)."""
        old, rollout = old_logprobs.double(), rollout_logprobs.double()
        gap, difference = old - rollout, (old.exp() - rollout.exp()).abs()
        rows = [-gap, gap.expm1() - gap, torch.expm1(2 * gap), gap.exp(), torch.exp(2 * gap)]
        rows += [difference, difference.square(), torch.ones_like(gap)]
        self.sums += torch.stack(rows).sum(-1)
        self.largest = torch.maximum(self.largest, torch.cat([difference, difference.new_zeros(1)]).max())

    def compute(self) -> dict[str, Tensor]:
        """Under the names above; empty without a token."""
        if self.sums[-1] == 0:
            return {}
        kl, k3_kl, chi2, ratio, ratio_square, mean, square, _ = (self.sums / self.sums[-1]).unbind()
        return {
            "rollout_corr/kl": kl,
            "rollout_corr/k3_kl": k3_kl,
            "rollout_corr/chi2_token": chi2,
            "rollout_corr/raw_eff_sample_size": ratio.square() / ratio_square,
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": self.largest,
            "training/rollout_probs_diff_std": (square - mean.square()).clamp(min=0).sqrt(),
        }


class ImportanceWeights(Metric):
    r"""What the corrections do: effective sample size, mean and largest weight, and the share of tokens kept.

    The effective sample size is that of the kept tokens' weights, as a share of all tokens:
    :math:`(\sum w)^2 / (R \sum w^2)`. 1 means that every token counts the same.
    """

    full_state_update = False
    sums: Tensor
    largest: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, weights: Tensor, keep: Tensor) -> None:
        """Add response tokens' weights, (R,), and which of them are kept, (R,) bool."""
        kept = weights.double() * keep
        self.sums += torch.stack([kept, kept.square(), keep.double(), torch.ones_like(kept)]).sum(-1)
        self.largest = torch.maximum(self.largest, torch.cat([kept, kept.new_zeros(1)]).max())

    def compute(self) -> dict[str, Tensor]:
        """Under ``rollout_corr/``; empty without a token."""
        total, square, kept, count = self.sums.unbind()
        if count == 0:
            return {}
        return {
            "rollout_corr/rollout_is_eff_sample_size": total.square() / (count * square.clamp(min=1e-300)),
            "rollout_corr/rollout_is_mean": total / kept.clamp(min=1),
            "rollout_corr/rollout_is_max": self.largest,
            "rollout_corr/kept_fraction": kept / count,
        }
