"""Is the answer of a response mathematically equal to the gold one?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dclightning.data.problems import Problem
from dclightning.rewards.answers import last_boxed, last_number
from dclightning.rewards.equality import Conventions, Verdict, judge, judge_plain
from dclightning.rewards.workers import Workers

if TYPE_CHECKING:
    from dclightning.rollout.types import Completion  # imports torch, which no verdict needs


class MathReward:
    r"""1.0 if the answer of a response equals the gold answer, else 0.0.

    The answer is what stands in the last complete ``\boxed{}``. Whatever takes work to compare is compared in worker
    processes, which start when they are first needed; the verdict is the same from every thread and process. A response
    whose comparison takes too long or fails is wrong, so that no policy learns to escape its verdict.

    Args:
        conventions: What counts as equal where the choice is open.
        unboxed_number: Whether the last number counts where nothing is boxed, for models that do not box.
        time_limit: Seconds that a comparison may take.
        workers: Processes that compare.

    Attributes:
        timeouts: Comparisons so far that took too long.
        errors: Comparisons so far that failed; the verdict's reason says how.
    """

    def __init__(
        self,
        conventions: Conventions = Conventions(),
        unboxed_number: bool = False,
        time_limit: float = 5.0,
        workers: int = 2,
    ) -> None:
        self.conventions = conventions
        self.unboxed_number = unboxed_number
        self.timeouts = 0
        self.errors = 0
        self._workers = Workers(workers, time_limit)

    def __call__(self, problems: Sequence[Problem], completions: Sequence["Completion"]) -> list[float | None]:
        """One verdict for each completion."""
        verdicts = self.verdicts([problem.answer for problem in problems], [c.text for c in completions])
        return [float(verdict.equal) for verdict in verdicts]

    def verdict(self, gold: str, response: str) -> Verdict:
        """Whether a response's answer is the gold answer, and why."""
        return self.verdicts([gold], [response])[0]

    def verdicts(self, golds: Sequence[str], responses: Sequence[str]) -> list[Verdict]:
        """The same for many at once."""
        return self._compare(golds, [self.answer(response) for response in responses])

    def answer_classes(self, answers: Sequence[str | None], right: Sequence[bool]) -> list[int]:
        """Which of the answers to one problem are equal.

        Args:
            answers: Of the responses to it; None for one without.
            right: Whether each of them is right; those that are, are equal.

        Returns:
            The same number for equal answers; -1 where there is none.
        """
        classes: dict[str, int] = {}
        for answer, is_right in zip(answers, right, strict=True):
            if answer is not None and is_right:
                classes[answer] = 0
        left = [answer for answer in dict.fromkeys(answers) if answer is not None and answer not in classes]
        number = 1
        while left:
            first, *others = left
            verdicts = self._compare([first] * len(others), others)
            equal = {first, *(other for other, verdict in zip(others, verdicts, strict=True) if verdict.equal)}
            classes |= dict.fromkeys(equal, number)
            left, number = [answer for answer in others if answer not in equal], number + 1
        return [-1 if answer is None else classes[answer] for answer in answers]

    def _compare(self, golds: Sequence[str], answers: Sequence[str | None]) -> list[Verdict]:
        verdicts = [_at_once(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
        left = [i for i, verdict in enumerate(verdicts) if verdict is None]
        found = self._workers.map(judge, [(golds[i], answers[i], self.conventions) for i in left]) if left else []
        for i, result in zip(left, found, strict=True):
            verdicts[i] = self._counted(result)
        return verdicts  # type: ignore[return-value]

    def answer(self, response: str) -> str | None:
        """The answer that a response gives; None if it gives none."""
        answer = last_boxed(response)
        return last_number(response) if answer is None and self.unboxed_number else answer

    def close(self) -> None:
        """End the worker processes; the next verdict that needs some starts new ones."""
        self._workers.close()

    def _counted(self, result: Verdict | Exception) -> Verdict:
        if isinstance(result, TimeoutError):
            self.timeouts += 1
            return Verdict(False, f"took more than {self._workers.time_limit:g} s")
        if isinstance(result, Exception):
            result = Verdict(False, f"raised {type(result).__name__}", failed=True)
        self.errors += result.failed
        return result


def _at_once(gold: str, answer: str | None) -> Verdict | None:
    return Verdict(False, "no answer") if answer is None else judge_plain(gold, answer)
