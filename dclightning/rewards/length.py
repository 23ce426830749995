"""Math rewards that also look at the length. (A plain penalty for overlong responses is the module's ``overlong``.)"""

import math
from collections.abc import Sequence
from typing import Any

from dclightning.data.problems import Problem
from dclightning.rewards.math import MathReward
from dclightning.rollout.types import Completion


class CosineLength(MathReward):
    """Right answers are worth the more the shorter the response is, wrong ones the more the longer it is.

    The cosine reward of Yeo et al., https://arxiv.org/abs/2502.03373. It is no accuracy: set ``validation_reward``.

    Args:
        longest: Tokens of the longest response, which is as good as the longest allowed.
        right: Rewards of a right answer after 0 and after ``longest`` tokens.
        wrong: The same of a wrong one.
        options: Those of ``MathReward``.
    """

    def __init__(
        self,
        longest: int,
        right: tuple[float, float] = (1.0, 0.5),
        wrong: tuple[float, float] = (-1.0, -0.5),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if longest < 1:
            raise ValueError(f"longest={longest}: must be at least 1")
        self.longest = longest
        self.right = right
        self.wrong = wrong

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each completion."""
        verdicts = super().__call__(problems, completions)
        return [
            cosine(len(completion.token_ids) / self.longest, *(self.right if verdict else self.wrong))
            for verdict, completion in zip(verdicts, completions, strict=True)
        ]


class ShorterInGroup(MathReward):
    """The verdict plus up to half of ``share`` for the shortest response to a problem, minus as much for the longest.

    Wrong answers gain nothing by being short. The length reward of Kimi k1.5, https://arxiv.org/abs/2501.12599. It is
    no accuracy: set ``validation_reward``.

    Args:
        share: How much the length counts.
        options: Those of ``MathReward``.
    """

    def __init__(self, share: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.share = share

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each completion, of which all to a problem must be here."""
        verdicts = super().__call__(problems, completions)
        lengths: dict[str, list[int]] = {}
        for problem, completion in zip(problems, completions, strict=True):
            lengths.setdefault(problem.id, []).append(len(completion.token_ids))
        rewards: list[float | None] = []
        for verdict, problem, completion in zip(verdicts, problems, completions, strict=True):
            bonus = shortness(len(completion.token_ids), lengths[problem.id])
            rewards.append(self.share * bonus + 1.0 if verdict else self.share * min(bonus, 0.0))
        return rewards


def cosine(part: float, start: float, end: float) -> float:
    """From ``start`` at 0 to ``end`` at 1 and beyond, along half a period of the cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


def shortness(length: int, lengths: Sequence[int]) -> float:
    """From 0.5 for the shortest to -0.5 for the longest; 0 where all are equal."""
    shortest, longest = min(lengths), max(lengths)
    return 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
