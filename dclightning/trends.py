"""How far the latest values of a metric are from its usual ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SMALLEST = 1e-5
"""Where ratios are taken, smaller values count as this one: a discrepancy of 1e-7 is a rounding error, not a floor."""


def deviation(usual: Sequence[float], latest: Sequence[float], least_spread: float = 0.0) -> float:
    r"""By how many spreads the latest values are above (or, negative, below) the usual ones.

    Both are represented by their medians, and the spread is 1.4826 times the median absolute deviation (MAD) of the
    usual values: for normal values, their standard deviation. No single value matters, however odd.

    Args:
        usual: At least one.
        latest: At least one.
        least_spread: The spread is taken to be no less. Without it, values that never moved have none, and any
            difference from them is infinite.
    """
    centre = median(usual)
    spread = max(1.4826 * median(abs(value - centre) for value in usual), least_spread)
    gap = median(latest) - centre
    if spread == 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / spread


@dataclass(frozen=True)
class Trend:
    """A metric, and which ways of it are bad."""

    metric: str
    """Its name in the logs."""
    falls: str = ""
    """What it is called when it falls; empty if that is no fault."""
    rises: str = ""
    """What it is called when it rises; empty if that is no fault."""
    by_ratio: bool = True
    """Whether values are compared by their ratio, as positive ones of any size should be, or by their difference."""

    def deviation(self, usual: Sequence[float], latest: Sequence[float], least_spread: float) -> float:
        """The same as :func:`deviation`, on this metric's scale.

        Args:
            usual: At least one.
            latest: At least one.
            least_spread: As a share of the usual value.
        """
        if self.by_ratio:
            return deviation(_logs(usual), _logs(latest), least_spread)
        return deviation(usual, latest, least_spread * abs(median(usual)))

    def fault(self, deviation: float, threshold: float) -> str:
        """What is wrong at this deviation; empty if nothing is. NaN, no deviation, is no fault."""
        if deviation < -threshold:
            return self.falls
        return self.rises if deviation > threshold else ""


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(max(value, SMALLEST)) for value in values]
