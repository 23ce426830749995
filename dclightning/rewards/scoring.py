"""Runs the rewards of a rollout: one or several, plain or async, each under its own name."""

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dclightning.data.problems import Problem
from dclightning.errors import RunStoppedError, check_choice
from dclightning.rollout.types import Completion

log = logging.getLogger(__name__)

Reward = Callable[[Sequence[Problem], Sequence[Completion]], Any]
"""Scores completions, each against its problem: gives a list with a number for each, or None where it cannot.

It may be async. What it counts under the attributes ``timeouts`` and ``errors``, if it has them, is logged.
"""

OnError = Literal["skip", "stop"]


@dataclass
class Scores:
    """What B completions got."""

    total: Tensor
    """The sum of the parts, each times its weight; NaN where one that has a weight is missing. (B,) float32"""
    parts: dict[str, Tensor]
    """By name each reward, before its weight; NaN where it could not score. (B,) float32"""
    timeouts: int
    """Verdicts that took too long."""
    errors: int
    """Failed verdicts, and completions for which a reward raised an exception or gave something that is no number."""


class Scorer:
    """One or several rewards, and how much each of them weighs.

    Async rewards score the completions of a problem as soon as these are finished, in a thread of their own, while
    others are still being sampled. The others are called once, with all completions.

    Args:
        rewards: By the names that they are logged under.
        weights: How much each of them counts; 1 by default. One of weight 0 is logged only.
        on_error: What happens where a reward raises an exception or gives something that is no number. It is then
            called anew for one completion after another, to find out for which it fails. ``skip``: those count as not
            scored; if there is no other, the run stops. ``stop``: the run stops.
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
        if not any(self.weights.values()):
            raise ValueError("reward_weights: at least one must not be 0")
        self.on_error = on_error
        self._begun: dict[str, list[tuple[int, list[Problem], list[Completion], Future[Any]]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

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
                future = self._start(reward(problems, completions))
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
            failures: list[tuple[str, BaseException]] = []
            for _, asked, given, future in chunks:
                values += self._scored(name, reward, asked, given, future, failures)
            self._report(name, failures, len(completions))
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

    def close(self) -> None:
        """End what rewards have started, if they can be closed, and the thread of the async ones."""
        for reward in self.rewards.values():
            if hasattr(reward, "close"):
                reward.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_stop, self._loop)
            self._thread.join()
            self._loop.close()
            self._loop = None
        self._begun = {}

    def _scored(
        self,
        name: str,
        reward: Reward,
        problems: list[Problem],
        completions: list[Completion],
        future: Future[Any] | None,
        failures: list[tuple[str, BaseException]],
    ) -> list[float]:
        """What a reward gives to each completion, NaN for nothing; adds to the failures."""
        try:
            values = self._result(reward(problems, completions)) if future is None else future.result()
            return _numbers(values, len(completions))
        except (Exception, SystemExit) as error:
            if len(completions) > 1 and not isinstance(error, _NoListError):  # who was it?
                pairs = zip(problems, completions, strict=True)
                return [self._scored(name, reward, [p], [c], None, failures)[0] for p, c in pairs]
            failures += [(problem.id, error) for problem in problems]
            return [math.nan] * len(problems)

    def _report(self, name: str, failures: list[tuple[str, BaseException]], count: int) -> None:
        if not failures:
            return
        problem, error = failures[0]
        message = f"reward {name}: {_described(error)}, on a response to problem {problem!r}"
        if self.on_error == "stop" or len(failures) == count:
            raise RunStoppedError(message) from error
        log.warning("%s (%d of %d responses are not scored)", message, len(failures), count)
        log.debug("reward %s failed", name, exc_info=error)

    def _counted(self, what: str) -> int:
        return sum(int(getattr(reward, what, 0)) for reward in self.rewards.values())

    def _result(self, values: Any) -> Any:
        return self._start(values).result() if inspect.isawaitable(values) else values

    def _start(self, values: Awaitable[Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True)
            self._thread.start()

        async def waited() -> Any:
            return await values

        return asyncio.run_coroutine_threadsafe(waited(), self._loop)


def reward_name(reward: Reward) -> str:
    """What a reward is logged as: its attribute ``name``, or the name of the function or class."""
    return str(getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__)


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)


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
    if math.isinf(number):
        raise _NoNumberError(f"gave {value!r}; must be a finite number, or None")
    return number


def _described(error: BaseException) -> str:
    """What went wrong, and where in the reward's own code."""
    if isinstance(error, _NoListError | _NoNumberError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
