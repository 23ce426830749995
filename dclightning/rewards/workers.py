"""Calls that may hang, run away with the memory or crash: in worker processes that are killed when they do."""

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.util import Finalize
from typing import Any

from loky.backend import get_context
from pebble import ProcessPool

_MEMORY = 4 * 2**30  # bytes that a worker may use
_DAY = 86_400.0
_CALLS = 10_000  # after which a worker is replaced, whatever libraries have cached in it


class Workers:
    """Processes that answer calls, each within a time limit.

    They start with the first call, and anew after ``close`` and in a fork of the process. They do not import the
    program's main module: scripts need no guard, and functions must live in a module of their own. Any thread may call.

    Args:
        count: How many processes.
        time_limit: Seconds that a call may take before its process is killed and replaced.
    """

    def __init__(self, count: int, time_limit: float) -> None:
        if count < 1:
            raise ValueError(f"workers={count}: must be at least 1")
        if not 0 < time_limit <= _DAY:
            raise ValueError(f"time_limit={time_limit}: must be positive, and at most a day")
        self.count = count
        self.time_limit = time_limit
        self._pool: ProcessPool | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def map(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """What the function returns for each tuple of arguments, in their order.

        In place of a result stands the exception that a call ended with: TimeoutError if it took too long, its own, or
        ``pebble.ProcessExpired`` if its process died.

        Raises:
            ValueError: If the function is one of the main module's.
            CancelledError: If another thread closes the workers.
        """
        if function.__module__ == "__main__":
            raise ValueError(f"{function.__qualname__}: workers can call functions of importable modules only")
        arguments = list(arguments)
        try:
            return self._map(function, arguments)
        except BrokenProcessPool:  # by a worker that died between two calls, of which none is to blame
            return self._map(function, arguments)

    def close(self) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            self._close()

    def _map(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        pool = self._running_pool()
        try:
            futures = [pool.schedule(_call, (function, each), timeout=self.time_limit) for each in arguments]
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from error
        try:
            while wait(futures, timeout=0.5).not_done and pool.active:
                pass
        except KeyboardInterrupt:
            self.close()
            raise
        errors = [future.exception() if future.done() else BrokenProcessPool() for future in futures]
        if any(isinstance(error, BrokenProcessPool) for error in errors):
            raise (
                BrokenProcessPool("a worker died") if self._pool is pool else CancelledError("the workers were closed")
            )
        return [future.result() if error is None else error for future, error in zip(futures, errors, strict=True)]

    def _running_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None or self._owner != os.getpid() or not self._pool.active:
                self._close()
                # A process of multiprocessing.Pool is a daemon, which may not have children; these end when it does.
                multiprocessing.current_process().daemon = False
                limits = (self.time_limit, _MEMORY)
                self._pool = ProcessPool(self.count, _CALLS, _prepare, limits, get_context("loky"))
                self._owner = os.getpid()
                # Also at the end of a child process, which would wait for its own children otherwise.
                self._stop = Finalize(self, _stop, (self._pool,), exitpriority=10)
                _start(self._pool)
            return self._pool

    def _close(self) -> None:
        pool, self._pool = self._pool, None  # first, or a call that waits would take the pool for broken
        if pool is not None and self._owner == os.getpid():
            self._stop()

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "time_limit": self.time_limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _start(pool: ProcessPool) -> None:
    """Start threads and workers, to none of which Ctrl-C is news: they inherit what the thread blocks now."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _ = pool.active
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


_abandoned = 0.0
"""Seconds, in a worker, after which a call must have been killed if anybody was left to do it."""


def _prepare(time_limit: float, memory: int) -> None:
    """In a new worker: a kill is a kill, and memory is limited."""
    global _abandoned
    _abandoned = 2 * time_limit + 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One call in a worker. The alarm ends a process that hangs after its parent was killed."""
    signal.setitimer(signal.ITIMER_REAL, _abandoned)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
