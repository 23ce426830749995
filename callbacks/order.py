"""What the callbacks that may end a run have in common: their place in the list."""

from typing import Any

import lightning as L

from dclightning.callbacks.adaptive_budget import AdaptiveBudget
from dclightning.callbacks.lagrangian import LagrangianCallback
from dclightning.errors import UserError


def check_comes_after_multiplier(callback: L.Callback, trainer: Any) -> None:
    """Refuse a callback that may end a step early before those that move the multiplier: they would miss the step."""
    for later in trainer.callbacks[trainer.callbacks.index(callback) :]:
        if isinstance(later, LagrangianCallback | AdaptiveBudget):
            raise UserError(f"callbacks: {type(callback).__name__} must come after {type(later).__name__} in the list")
