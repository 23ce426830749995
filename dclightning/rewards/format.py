"""Rewards for the form of a response, whatever it says."""

import re
from collections.abc import Sequence

from dclightning.data.problems import Problem
from dclightning.rewards.answers import last_boxed
from dclightning.rollout.types import Completion

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def one_box(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    r"""1.0 for a response with exactly one ``\boxed{}``, which is complete and not empty; else 0.0."""
    return [float(len(_BOX.findall(c.text)) == 1 and bool((last_boxed(c.text) or "").strip())) for c in completions]


def think_tags(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    """1.0 for reasoning that ends in ``</think>`` with an answer after it, neither of them empty; else 0.0."""
    return [float(_is_thought_and_answer(completion.text)) for completion in completions]


def _is_thought_and_answer(text: str) -> bool:
    # The opening tag may be the prompt's.
    thought, closed, answer = text.strip().removeprefix("<think>").partition("</think>")
    again = "<think>" in thought or "<think>" in answer or "</think>" in answer
    return bool(closed and thought.strip() and answer.strip() and not again)
