"""What a policy's responses to problems are worth."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dclightning.accuracy import avg_at_k, maj_at_k, pass_at_k
from dclightning.data.problems import Problem
from dclightning.rollout.types import Completion, Scores


@dataclass
class Response:
    """One response, and what it is worth."""

    text: str
    tokens: int
    """How many it has, the end-of-sequence token included."""
    truncated: bool
    reward: float
    """At least 1 is right; 0 also where it could not be scored."""
    answer: str | None = None
    """What was compared, if there is an answer and the reward compares answers."""
    answer_class: int = -1
    """The same number for equal answers to a problem; -1 where there is none."""


@dataclass
class Evaluated:
    """A problem and a policy's k responses to it."""

    problem: Problem
    responses: list[Response]


def to_line(result: Evaluated) -> bytes:
    """A problem and its responses as a line of JSON; half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    return json.dumps(asdict(result), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def from_line(line: bytes) -> Evaluated:
    """What ``to_line`` has written."""
    row = json.loads(line)
    return Evaluated(Problem(**row["problem"]), [Response(**response) for response in row["responses"]])


def compares_answers(reward: Any) -> bool:
    """Whether a reward can tell which answers are equal, as ``MathReward`` can, so that there is a majority."""
    return hasattr(reward, "answer_classes")


def evaluated(
    problems: Sequence[Problem], completions: Sequence[Completion], scores: Scores, reward: Any
) -> list[Evaluated]:
    """The responses to each problem with their rewards and answers.

    Args:
        problems: P of them.
        completions: k to each, side by side, (P k).
        scores: Of the completions.
        reward: What gave them.
    """
    k = len(completions) // len(problems)
    responses = [
        Response(completion.text, len(completion.token_ids), completion.finish_reason == "length", score)
        for completion, score in zip(completions, scores.total.nan_to_num(0.0).tolist(), strict=True)
    ]
    found = [Evaluated(problem, responses[i * k : (i + 1) * k]) for i, problem in enumerate(problems)]
    if compares_answers(reward):
        for result in found:
            answers = [reward.answer(response.text) for response in result.responses]
            classes = reward.answer_classes(answers, [response.reward >= 1 for response in result.responses])
            for response, answer, answer_class in zip(result.responses, answers, classes, strict=True):
                response.answer, response.answer_class = answer, answer_class
    return found


def measures(results: Sequence[Evaluated], k: int, majority: bool) -> dict[str, Tensor]:
    """Of each problem: avg@k, pass@k, maj@k, the mean length in tokens, and the share of truncated responses.

    Args:
        results: For P problems; there may be none.
        k: Responses to each.
        majority: Whether answers were compared, without which there is no maj@k.

    Returns:
        By name, (P,) float64 each.
    """

    def table(field: str, dtype: torch.dtype = torch.float64) -> Tensor:
        values = [[getattr(response, field) for response in result.responses] for result in results]
        return torch.tensor(values, dtype=dtype).reshape(len(results), k)

    correct = table("reward") >= 1
    found = {f"avg@{k}": avg_at_k(table("reward")), f"pass@{k}": pass_at_k(correct, k)}
    if majority:
        found[f"maj@{k}"] = maj_at_k(correct, table("answer_class", torch.int64))
    return {**found, "response_length": table("tokens").mean(-1), "truncated_fraction": table("truncated").mean(-1)}
