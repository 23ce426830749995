"""Dual-GRPO: discrepancy has a price that never moves."""

from typing import Literal

import torch
from torch import Tensor

from dclightning.callbacks.penalty import Penalty
from dclightning.errors import check_choice

Form = Literal["hinge", "gate"]


class FixedPenalty(Penalty):
    r"""Charges each token a fixed multiple of its discrepancy.

    Args:
        multiplier: :math:`\lambda`.
        threshold: Discrepancy that is free, c; 0 charges every token (Dual-GRPO), more is thresholded Dual-GRPO.
        form: Above the threshold, ``hinge`` charges :math:`\lambda (\delta_t - c)` and ``gate``
            :math:`\lambda \delta_t`.
    """

    def __init__(self, multiplier: float = 0.1, threshold: float = 0.0, form: Form = "hinge") -> None:
        if not multiplier >= 0:
            raise ValueError(f"multiplier={multiplier}: must not be negative")
        check_choice("form", form, Form)
        if not threshold >= 0:
            raise ValueError(f"threshold={threshold}: must not be negative")
        self.multiplier = multiplier
        self.threshold = threshold
        self.form = form

    def penalty(self, delta: Tensor) -> Tensor:
        """What tokens of these discrepancies are charged, (R,)."""
        if self.form == "hinge":
            return self.multiplier * (delta - self.threshold).clamp(min=0)
        return self.multiplier * torch.where(delta > self.threshold, delta, 0.0)
