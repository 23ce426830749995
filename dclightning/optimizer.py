"""The optimizer's settings."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings; the defaults are the paper's."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients of an optimizer step are scaled down to this norm."""
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """How the learning rate moves from rollout to rollout."""
    warmup: int = 0
    """Rollouts over which the learning rate rises, for the schedules that have a warm-up."""

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr={self.lr}: must not be negative")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be positive; .inf turns clipping off")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must not be negative")
