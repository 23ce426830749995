"""A penalty for responses that repeat themselves."""

from collections.abc import Sequence

from dclightning.data.problems import Problem
from dclightning.rollout.types import Completion


class RepetitionPenalty:
    """A negative reward in proportion to the share of n-grams of tokens that the response has had before.

    After the repetition penalty of Yeo et al., https://arxiv.org/abs/2502.03373.

    Args:
        ngram: Tokens to an n-gram. Short ones recur in any text.
        worst: The reward of a response that does nothing but repeat itself.
    """

    def __init__(self, ngram: int = 40, worst: float = -1.0) -> None:
        if ngram < 1:
            raise ValueError(f"ngram={ngram}: must be at least 1")
        if worst > 0:
            raise ValueError(f"worst={worst}: must not be positive")
        self.ngram = ngram
        self.worst = worst

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        """Between ``worst`` and 0 for each completion."""
        return [self.worst * repeated_share(completion.token_ids, self.ngram) for completion in completions]


def repeated_share(token_ids: Sequence[int], ngram: int) -> float:
    """The share of n-grams that have occurred before; 0 where there is none."""
    ngrams = list(zip(*(token_ids[start:] for start in range(ngram)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
