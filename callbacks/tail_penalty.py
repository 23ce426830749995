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
        free_share: Share of the tokens that pay nothing.
    """

    def __init__(self, free_share: float = 0.99) -> None:
        if not 0 < free_share < 1:
            raise ValueError(f"free_share={free_share}: must be between 0 and 1")
        self.free_share = free_share

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse to stand alone, before anything is computed."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        if not any(hasattr(callback, "penalty") for callback in before):
            raise UserError("callbacks: TailPenalty needs LagrangianCallback or FixedPenalty before it in the list")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stand between the penalty and the tokens."""
        whole = pl_module.penalty

        def tail(delta: Tensor) -> Tensor:
            everyones = data_parallel_gather(trainer.strategy, delta)
            if len(everyones) == 0:
                return torch.zeros_like(delta)
            return torch.where(delta > quantile(everyones, self.free_share), whole(delta), 0.0)

        pl_module.penalty = tail
