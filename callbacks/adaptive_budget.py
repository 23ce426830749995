"""Beyond the paper: a budget that is measured instead of chosen."""

import math
from collections import deque
from typing import Any

import lightning as L

from dclightning.callbacks.lagrangian import LagrangianCallback
from dclightning.errors import UserError
from dclightning.lagrangian import running_budget


class AdaptiveBudget(L.Callback):
    """Lets the budget of a :class:`LagrangianCallback` follow a running quantile of the measured mean discrepancies.

    A low quantile of the last steps estimates the floor that the engine's precision sets; the budget is some slack
    above it. Until there are enough steps, the budget is the one that was given. It never rises above the first one
    that was measured: a discrepancy that creeps up is what the constraint is there to stop.

    Args:
        floor_quantile: Which quantile counts as the floor.
        slack: How far the budget is above the floor, as a share of it.
        window: How many of the latest steps are looked at.
        warmup: Steps before the budget first moves.
    """

    def __init__(self, floor_quantile: float = 0.25, slack: float = 0.2, window: int = 50, warmup: int = 10) -> None:
        if not 0 <= floor_quantile <= 1:
            raise ValueError(f"floor_quantile={floor_quantile}: must be at least 0 and at most 1")
        if not slack >= 0:
            raise ValueError(f"slack={slack}: must not be negative")
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup={warmup}: must be at least 1 and at most window={window}")
        self.floor_quantile = floor_quantile
        self.slack = slack
        self.warmup = warmup
        self.measured: deque[float] = deque(maxlen=window)
        self.ceiling = math.inf

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the multiplier whose budget it is."""
        found = [c for c in trainer.callbacks if isinstance(c, LagrangianCallback)]  # type: ignore[attr-defined]
        if not found:
            raise UserError("callbacks: AdaptiveBudget needs a LagrangianCallback, whose budget it moves")
        self.lagrangian = found[0]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the budget of this step from the steps before it."""
        if len(self.measured) >= self.warmup:
            budget = running_budget(list(self.measured), self.floor_quantile, self.slack)
            if math.isinf(self.ceiling):
                self.ceiling = budget
            self.lagrangian.budget = min(budget, self.ceiling)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the step's measurement in."""
        mean = self.lagrangian.mean_discrepancy(outputs)
        if math.isfinite(mean):
            self.measured.append(mean)

    def state_dict(self) -> dict[str, Any]:
        """What was measured lately, and the highest budget."""
        return {"measured": list(self.measured), "ceiling": self.ceiling}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.measured = deque(state_dict["measured"], maxlen=self.measured.maxlen)
        self.ceiling = state_dict["ceiling"]
