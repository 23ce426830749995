"""Is the boxed answer mathematically equal to the gold one?"""

import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dclightning.data.problems import Problem
from dclightning.rollout.types import Completion

_BOXED = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")
_INTEGER = re.compile(r"[+-]?\d{1,1000}")


class MathReward:
    r"""1.0 if the last complete ``\boxed{}`` of a response equals the gold answer, else 0.0.

    Integers are compared as such; everything else by math-verify.

    Args:
        time_limit: Seconds that math-verify may take to parse, and again to compare. It holds in the main thread only.
    """

    def __init__(self, time_limit: int = 5) -> None:
        self.time_limit = time_limit

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """One verdict for each completion."""
        return [float(self.correct(p.answer, c.text)) for p, c in zip(problems, completions, strict=True)]

    def correct(self, gold: str, response: str) -> bool:
        """Whether the response's last complete box holds the gold answer."""
        answer = last_boxed(response)
        if answer is None:
            return False
        if answer.strip() == gold.strip():
            return True
        if _INTEGER.fullmatch(answer.strip()) and _INTEGER.fullmatch(gold.strip()):
            return int(answer) == int(gold)
        from math_verify import verify

        # math-verify's limits are alarms, which only the main thread can set.
        limit = self.time_limit if threading.current_thread() is threading.main_thread() else None
        return bool(verify(_parse(gold, limit), _parse(answer, limit), timeout_seconds=limit))


def last_boxed(response: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` whose braces are balanced; None if there is none."""
    opened: list[int | None] = []  # for each brace that is open, where its box's content starts
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(response):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] == _BOXED else None)
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = (start, brace.start())
    return None if last is None else response[slice(*last)]


@lru_cache(maxsize=4096)
def _parse(answer: str, time_limit: int | None) -> list[Any]:
    from math_verify import parse

    # Without dollar signs math-verify misreads many answers.
    return list(parse(answer if "$" in answer else f"${answer}$", parsing_timeout=time_limit))
