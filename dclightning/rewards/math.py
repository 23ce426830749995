"""Is the answer of a response mathematically equal to the gold one?"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dclightning.data.problems import Problem
from dclightning.rewards.answers import last_boxed, last_number
from dclightning.rewards.equality import Conventions, Verdict, judge
from dclightning.rollout.types import Completion


class _OutOfTime(BaseException):
    """Not an Exception, which libraries catch."""


class MathReward:
    r"""1.0 if the answer of a response equals the gold answer, else 0.0.

    The answer is what stands in the last complete ``\boxed{}``.

    Args:
        conventions: What counts as equal where the choice is open.
        unboxed_number: Whether the last number counts where nothing is boxed, for models that do not box.
        time_limit: Seconds that a verdict may take. It holds in the main thread only.
    """

    def __init__(
        self, conventions: Conventions = Conventions(), unboxed_number: bool = False, time_limit: float = 5.0
    ) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit={time_limit}: must be positive")
        self.conventions = conventions
        self.unboxed_number = unboxed_number
        self.time_limit = time_limit

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """One verdict for each completion."""
        return [float(self.verdict(p.answer, c.text).equal) for p, c in zip(problems, completions, strict=True)]

    def verdict(self, gold: str, response: str) -> Verdict:
        """Whether the response's answer is the gold answer, and why."""
        answer = last_boxed(response)
        if answer is None and self.unboxed_number:
            answer = last_number(response)
        if answer is None:
            return Verdict(False, "no answer")
        with _alarm(self.time_limit):
            return judge(gold, answer, self.conventions)
        return Verdict(False, "took too long")


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End what takes too long; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
