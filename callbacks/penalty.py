"""What the callbacks that charge tokens for their discrepancy have in common."""

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
from torch import Tensor

from dclightning.errors import UserError


class Penalty(L.Callback, ABC):
    """Charges tokens, and sees to it that no other callback does: what they pay would be a matter of their order."""

    @abstractmethod
    def penalty(self, delta: Tensor) -> Tensor:
        """What tokens of these discrepancies are charged, (R,)."""

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse another penalty beside this one, before anything is computed."""
        for other in trainer.callbacks:
            if other is not self and hasattr(other, "penalty"):
                raise UserError(f"callbacks: {type(self).__name__} and {type(other).__name__} both set the penalty")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Charge from the first step on."""
        if pl_module.penalty is not None:
            raise UserError(f"callbacks: {type(self).__name__} is not the only one that sets the penalty")
        pl_module.penalty = self.penalty
