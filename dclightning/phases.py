"""Which part of a training step runs now, and how long each part took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """A stopwatch for the parts of a step, which also tells a listener (the progress bar) what starts."""

    def __init__(self) -> None:
        self.listener: Callable[[str], None] | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part of the step; parts of the same name add up."""
        if self.listener is not None:
            self.listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


phases = Phases()
"""The process's own stopwatch: one training runs in a process at a time."""
