"""DC-GRPO's multiplier: the price of discrepancy, which rises while there is too much of it."""

import logging
import math
from typing import Any, Literal

import lightning as L
from torch import Tensor

from dclightning.callbacks.penalty import Penalty
from dclightning.discrepancy import sequence_mean, token_mean
from dclightning.errors import check_choice
from dclightning.lagrangian import dual_ascent

MeanKind = Literal["sequence", "token"]

log = logging.getLogger(__name__)


class LagrangianCallback(Penalty):
    r"""Charges each token :math:`\lambda \delta_t` and moves :math:`\lambda` by dual ascent once per training step.

    The multiplier used in a step is the one before that step's update, and it is the same on every rank.

    Args:
        initial: :math:`\lambda_0`.
        lr: The dual learning rate :math:`\eta`.
        budget: The mean discrepancy that is tolerated, c.
        min_multiplier: Lower bound of the multiplier.
        max_multiplier: Upper bound of the multiplier.
        aggregation: How the step's discrepancy is averaged: ``sequence``, over the tokens of each response and then
            over responses, or ``token``, over all tokens.
    """

    def __init__(
        self,
        initial: float = 0.1,
        lr: float = 1.0,
        budget: float = 0.0037,
        min_multiplier: float = 0.0,
        max_multiplier: float = 1.0,
        aggregation: MeanKind = "sequence",
    ) -> None:
        if not 0 <= min_multiplier <= initial <= max_multiplier:
            raise ValueError(
                f"initial={initial}: must lie between min_multiplier={min_multiplier} and "
                f"max_multiplier={max_multiplier}, and none may be negative"
            )
        if not lr >= 0:
            raise ValueError(f"lr={lr}: must not be negative")
        if not budget >= 0:
            raise ValueError(f"budget={budget}: must not be negative")
        check_choice("aggregation", aggregation, MeanKind)
        self.multiplier = initial
        self.lr = lr
        self.budget = budget
        self.bounds = (min_multiplier, max_multiplier)
        self.aggregation = aggregation
        self.history: list[float] = []
        """The multiplier that each step so far was computed with."""

    def penalty(self, delta: Tensor) -> Tensor:
        """What tokens of these discrepancies are charged, (R,)."""
        return self.multiplier * delta

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the multiplier that the step used, then move it."""
        delta, mean = outputs["delta"], self.mean_discrepancy(outputs)
        if not math.isfinite(mean):
            log.warning("The step's mean discrepancy is %s: the multiplier stays at %g", mean, self.multiplier)
        pl_module.log("lagrangian/violation", mean - self.budget)
        pl_module.log("discrepancy/over_budget", (delta > self.budget).float().mean())
        pl_module.log("lagrangian/budget", self.budget)
        pl_module.log("lagrangian/multiplier", self.multiplier, prog_bar=True)
        self.history.append(self.multiplier)
        self.multiplier = dual_ascent(self.multiplier, mean, self.budget, self.lr, self.bounds)

    def mean_discrepancy(self, outputs: dict[str, Tensor]) -> float:
        """The mean discrepancy of a step, from what the training step returned; not finite if it had no token."""
        if self.aggregation == "sequence":
            return sequence_mean(outputs["delta"], outputs["response_lengths"]).item()
        return token_mean(outputs["delta"]).item()

    def state_dict(self) -> dict[str, Any]:
        """The multiplier and its past."""
        return {"multiplier": self.multiplier, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.multiplier = state_dict["multiplier"]
        self.history = list(state_dict["history"])
