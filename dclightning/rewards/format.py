"""Rewards for the form of a response, whatever it says."""

import re
from collections.abc import Sequence

from dclightning.data.problems import Problem
from dclightning.rewards.answers import last_boxed
from dclightning.rollout.types import Completion

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The opening tag may be the prompt's.
_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>((?:(?!</?think>).)*)", re.DOTALL)


def one_box(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    r"""1.0 for a response with exactly one ``\boxed{}``, which is complete and not empty; else 0.0."""
    return [float(len(_BOX.findall(c.text)) == 1 and bool((last_boxed(c.text) or "").strip())) for c in completions]


def think_tags(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    """1.0 for reasoning that ends in ``</think>`` with an answer after it, neither of them empty; else 0.0."""
    found = [_THOUGHT.fullmatch(completion.text) for completion in completions]
    return [float(bool(thought and thought[1].strip() and thought[2].strip())) for thought in found]
