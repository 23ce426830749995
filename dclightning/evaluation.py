"""What a policy's responses to problems are worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dclightning.accuracy import avg_at_k, maj_at_k, pass_at_k
from dclightning.data.problems import Problem
from dclightning.rewards.scoring import Reward, Scores
from dclightning.rollout.types import Completion


@dataclass
class Evaluated:
    """A problem, a policy's k responses to it, and what they are worth."""

    problem: Problem
    completions: list[Completion]
    rewards: list[float]
    """NaN for a response that could not be scored; at least 1 is right."""
    classes: list[int] | None
    """Equal answers have the same number, responses without one -1; None if the reward does not compare answers."""


def evaluated(
    problems: Sequence[Problem], completions: Sequence[Completion], scores: Scores, reward: Reward
) -> list[Evaluated]:
    """The responses to each problem, which stand side by side, with their rewards and which answers are equal.

    Args:
        problems: P of them.
        completions: k to each, (P k).
        scores: Of the completions.
        reward: What gave them; answers are compared if it has ``answer_classes``, as ``MathReward`` has.
    """
    k = len(completions) // len(problems)
    rewards, found = scores.total.tolist(), []
    for place, problem in enumerate(problems):
        mine = slice(place * k, (place + 1) * k)
        some: Any = getattr(reward, "answer_classes", None)
        classes = some([c.text for c in completions[mine]], [r >= 1 for r in rewards[mine]]) if some else None
        found.append(Evaluated(problem, list(completions[mine]), rewards[mine], classes))
    return found


def measure_names(k: int, answers: bool) -> tuple[str, ...]:
    """What is measured on k responses to a problem, and whether answers are compared."""
    return (f"avg@{k}", f"pass@{k}", *([f"maj@{k}"] if answers else []), "response_length", "truncated_fraction")


def measures(results: Sequence[Evaluated], k: int, answers: bool) -> dict[str, Tensor]:
    """Of each problem: avg@k, pass@k, maj@k if answers are compared, mean length in tokens, and truncated share.

    Args:
        results: For P problems; there may be none.
        k: Responses to each.
        answers: Whether answers were compared.

    Returns:
        By name, (P,) float64 each.
    """

    def table(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).reshape(len(results), k)

    rewards = table([result.rewards for result in results], torch.float64).nan_to_num(0.0)
    correct = rewards >= 1
    lengths = table([[len(c.token_ids) for c in result.completions] for result in results], torch.float64)
    truncated = table([[c.finish_reason == "length" for c in result.completions] for result in results], torch.float64)
    classes = [maj_at_k(correct, table([result.classes for result in results], torch.int64))] if answers else []
    found = [avg_at_k(rewards), pass_at_k(correct, k), *classes, lengths.mean(-1), truncated.mean(-1)]
    return dict(zip(measure_names(k, answers), found, strict=True))
