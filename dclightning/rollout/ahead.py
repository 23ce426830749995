"""Drawing the next rollout while the update runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from dclightning.phases import phases
from dclightning.rollout.types import Rollout


class Ahead:
    """At most one rollout that is drawn in a thread of its own; nobody else may use the engine meanwhile."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._drawing: Future[Rollout] | None = None

    def begin(self, draw: Callable[[], Rollout]) -> None:
        """Start to draw."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "draw")
            if torch.cuda.is_available():  # which GPU is the current one, each thread has to be told
                self._thread.submit(torch.cuda.set_device, torch.cuda.current_device())
        self._drawing = self._thread.submit(draw)

    def wait(self) -> None:
        """Until the engine is free again."""
        if self._drawing is not None:
            with phases("wait"):
                wait([self._drawing])

    def take(self) -> Rollout | None:
        """The rollout, if there is one; or raise what went wrong with it."""
        self.wait()
        drawing, self._drawing = self._drawing, None
        return None if drawing is None else drawing.result()

    def cancel(self, interrupt: Callable[[], None]) -> None:
        """Give up what is drawn; ``interrupt`` makes the engine do so."""
        while self._drawing is not None and not self._drawing.done():
            interrupt()
            wait([self._drawing], timeout=0.1)
        if self._thread is not None:
            self._thread.shutdown()
        self._thread, self._drawing = None, None
