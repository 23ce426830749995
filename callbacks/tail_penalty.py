"""Beyond the paper: only the worst tokens pay."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from dclightning.discrepancy import quantile
from dclightning.errors import UserError
from dclightning.strategies import data_parallel_gather


class TailPenalty(L.Callback):
    """Lets only the tokens pay whose discrepancy is above a quantile of the step's.

    What they pay is up to the callback before this one, :class:`LagrangianCallback` or :class:`FixedPenalty`. The
    quantile is that of the tokens of all ranks.

    Args:
        quantile: Share of the tokens that pay nothing.
    """

    def __init__(self, quantile: float = 0.99) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile={quantile}: must be between 0 and 1")
        self.quantile = quantile

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stand between the penalty and the tokens."""
        if (whole := pl_module.penalty) is None:
            raise UserError("callbacks: TailPenalty needs LagrangianCallback or FixedPenalty before it in the list")

        def tail(delta: Tensor) -> Tensor:
            everyones = data_parallel_gather(trainer.strategy, delta)
            if len(everyones) == 0:
                return torch.zeros_like(delta)
            return torch.where(delta > quantile(everyones, self.quantile), whole(delta), 0.0)

        pl_module.penalty = tail
