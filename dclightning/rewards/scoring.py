"""Runs the rewards of a rollout: one or several, plain or async, each under its own name."""

import asyncio
import inspect
import logging
import math
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from dclightning.data.problems import Problem
from dclightning.errors import RunStoppedError, check_choice
from dclightning.rollout.types import Completion, Scores

log = logging.getLogger(__name__)

Reward = Callable[[Sequence[Problem], Sequence[Completion]], Any]
"""Scores completions, each against its problem: gives a list with a number for each, or None where it cannot.

It may be async. What it counts under the attributes ``timeouts`` and ``errors``, if it has them, is logged.
"""

OnError = Literal["skip", "stop"]

_GIVE_UP = 16  # completions that a reward fails for, and for no other, after which it is not called again


class Scorer:
    """One or several rewards, and how much each of them weighs.

    Async rewards score the completions of a problem as soon as these are finished, in a thread of their own, while
    others are still being sampled. The others are called once, with all completions.

    Args:
        rewards: By the names that they are logged under.
        weights: How much each of them counts; 1 by default. One of weight 0 is logged only.
        on_error: What happens where a reward raises an exception or gives no number. It is called again, first for one
            problem after another, then for one completion after another, to find out for which it fails. ``skip``:
            those count as not scored; if it fails for all of several problems, the run stops. ``stop``: the run stops.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], weights: Mapping[str, float] | None = None, on_error: OnError = "skip"
    ) -> None:
        check_choice("reward_errors", on_error, OnError)
        weights = weights or {}
        if unknown := sorted(set(weights) - set(rewards)):
            raise ValueError(f"reward_weights: {unknown[0]!r} is not one of {', '.join(rewards)}")
        if taken := sorted({"timeouts", "errors"} & set(rewards)):
            raise ValueError(f"extra_rewards: the name {taken[0]!r} is that of a counter; choose another one")
        self.rewards = dict(rewards)
        self.weights = {name: weights.get(name, 1.0) for name in rewards}
        if odd := [name for name, weight in self.weights.items() if not math.isfinite(weight)]:
            raise ValueError(f"reward_weights: {odd[0]}={self.weights[odd[0]]}: must be finite")
        if not any(self.weights.values()):
            raise ValueError("reward_weights: at least one must not be 0")
        self.on_error = on_error
        self._begun: dict[str, list[tuple[int, list[Problem], list[Completion], Future[Any]]]] = {}

    def begin(self, place: int, problem: Problem, completions: list[Completion]) -> None:
        """Let async rewards score the completions of a problem.

        Args:
            place: Of the problem in the rollout.
            problem: The problem.
            completions: All of this rollout, finished and decoded.
        """
        problems = [problem] * len(completions)
        for name, reward in self.rewards.items():
            if _is_async(reward):
                future = _start(partial(reward, problems, completions))
                self._begun.setdefault(name, []).append((place, problems, completions, future))

    def finish(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Scores:
        """Score all completions, those included that were begun with.

        Raises:
            RunStoppedError: If a reward fails and may not, or fails for all completions.
        """
        begun, self._begun = self._begun, {}
        before = self._counted("timeouts"), self._counted("errors")
        parts, failed = {}, 0
        for name, reward in self.rewards.items():
            whole = [(0, list(problems), list(completions), None)]
            chunks = sorted(begun.get(name, whole), key=lambda chunk: chunk[0])
            values: list[float] = []
            failures: list[_Failure] = []
            for _, asked, given, future in chunks:
                values += _scored(reward, asked, given, failures, future)
            self._report(name, failures, problems)
            failed += len(failures)
            parts[name] = torch.tensor(values)
        if all(part.isnan().all() for part in parts.values()):
            log.warning("No response was scored: %s gave None for all of them", " and ".join(parts))
        weighted = [weight * parts[name] for name, weight in self.weights.items() if weight]
        return Scores(
            total=torch.stack(weighted).sum(0),
            parts=parts,
            timeouts=self._counted("timeouts") - before[0],
            errors=self._counted("errors") - before[1] + failed,
        )

    def abandon(self) -> None:
        """Forget what was begun."""
        begun, self._begun = self._begun, {}
        for *_, future in (chunk for chunks in begun.values() for chunk in chunks):
            future.cancel()

    def close(self) -> None:
        """End what was begun, and what rewards have started, if they can be closed."""
        self.abandon()
        for reward in self.rewards.values():
            if hasattr(reward, "close"):
                reward.close()

    def _report(self, name: str, failures: list["_Failure"], problems: Sequence[Problem]) -> None:
        if not failures:
            return
        problem, error = failures[0]
        message = f"reward {name}: {_described(error)}, on a response to problem {problem!r}"
        for_all = len(failures) == len(problems) and len({problem.id for problem in problems}) > 1
        if self.on_error == "stop" or for_all:
            raise RunStoppedError(message) from error
        log.warning("%s (%d of %d responses are not scored)", message, len(failures), len(problems))
        log.debug("reward %s failed", name, exc_info=error)

    def _counted(self, what: str) -> int:
        counts = (getattr(reward, what, 0) for reward in self.rewards.values())
        return sum(count for count in counts if isinstance(count, int))


_Failure = tuple[str, BaseException]
"""The problem's id, and what went wrong for a response to it."""


def _scored(
    reward: Reward,
    problems: list[Problem],
    completions: list[Completion],
    failures: list[_Failure],
    future: Future[Any] | None = None,
) -> list[float]:
    """What a reward gives to each completion, NaN for nothing; adds to the failures."""
    try:
        values = reward(problems, completions) if future is None else future.result()
        if inspect.isawaitable(values):
            values = _start(lambda: values).result()
        return _numbers(values, len(completions))
    except (Exception, SystemExit) as error:
        if len(completions) == 1 or isinstance(error, _NoListError):
            failures += [(problem.id, error) for problem in problems]
            return [math.nan] * len(problems)
    # Which one was it? Responses to one problem stay together as long as they can, for a reward may compare them.
    found: list[float] = []
    before = len(failures)
    several = problems[0].id != problems[-1].id
    for _, some in groupby(range(len(problems)), key=lambda i: problems[i].id if several else i):
        places = list(some)
        if len(found) >= _GIVE_UP and len(failures) - before == len(found):  # a server is down, say
            failures += [(problem.id, failures[-1][1]) for problem in problems[places[0] :]]
            return found + [math.nan] * (len(problems) - places[0])
        found += _scored(reward, [problems[i] for i in places], [completions[i] for i in places], failures)
    return found


def reward_name(reward: Reward) -> str:
    """What a reward is logged as: its attribute ``name``, or the name of the function or class."""
    return str(getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__)


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process, the event loop of all async rewards. It runs to the end, for what rewards keep open belongs to it."""


def _start(reward: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Run a coroutine function in the thread of the async rewards."""

    async def run() -> Any:
        try:
            return await reward()
        except SystemExit as error:  # which would end the thread, and leave everybody waiting
            raise RuntimeError(f"SystemExit: {error}") from error

    if os.getpid() not in _loops:
        loop = _loops[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(run(), _loops[os.getpid()])


class _NoListError(Exception):
    """A reward gave no list, or one that is too long or too short."""


class _NoNumberError(Exception):
    """A reward gave something in place of a number."""


def _numbers(values: Any, count: int) -> list[float]:
    """As many numbers as there are completions; NaN for None."""
    if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__len__"):
        raise _NoListError(f"returned a {type(values).__name__}; must be a list of numbers")
    if len(values) != count:
        raise _NoListError(f"returned {len(values)} rewards for {count} completions")
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    """Of a Python, NumPy or torch scalar."""
    if value is None:
        return math.nan
    try:
        number = math.inf if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.inf
    if abs(number) > torch.finfo(torch.float32).max:
        raise _NoNumberError(f"gave {value!r}; must be a finite number, or None")
    return number


def _described(error: BaseException) -> str:
    """What went wrong, and where in the reward's own code."""
    if isinstance(error, _NoListError | _NoNumberError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
