"""The factor that keeps FP16 gradients from underflowing: as large as it can be without overflows."""

from dataclasses import dataclass


@dataclass
class LossScale:
    """Halves after a step whose gradient overflowed, and doubles after so many that did not (as torch's GradScaler).

    It is a power of two, so that scaling and unscaling round nothing.
    """

    value: float = 2.0**16
    good_steps: int = 0
    patience: int = 2000
    """Steps without overflow until it is tried twice as large."""

    def update(self, finite: bool) -> None:
        """Take in whether the gradient of a step was finite."""
        if not finite:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
        elif (good := self.good_steps + 1) == self.patience:
            self.value, self.good_steps = self.value * 2, 0
        else:
            self.good_steps = good
