"""Who draws what: ranks are grouped by the engine that they draw with, and by the data that they learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TypeVar

from dclightning.errors import UserError
from dclightning.rollout.types import Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class Shares:
    """One rank's share of the drawing and of the learning; groups are of ranks that follow each other."""

    ranks: int = 1
    """All of them."""
    rank: int = 0
    """This one."""
    training_parallel: int = 1
    """Ranks that share each layer of the policy, and learn from the same data."""
    engine_parallel: int = 1
    """Ranks that one engine spans, and that draw the same."""

    def __post_init__(self) -> None:
        if self.ranks % self.engine_parallel:
            raise UserError(
                f"engine tensor_parallel_size={self.engine_parallel}: must divide the number of ranks, {self.ranks}"
            )
        if max(self._sizes) % min(self._sizes):
            raise UserError(
                f"engine tensor_parallel_size={self.engine_parallel}: must divide the strategy's, "
                f"{self.training_parallel}, or be a multiple of it"
            )

    @property
    def replicas(self) -> int:
        """How many groups of ranks learn from different data."""
        return self.ranks // self.training_parallel

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.training_parallel

    @property
    def engines(self) -> int:
        """How many engines draw."""
        return self.ranks // self.engine_parallel

    @property
    def engine(self) -> int:
        """Which of them this rank has, or has a part of."""
        return self.rank // self.engine_parallel

    @property
    def leads_engine(self) -> bool:
        """Whether this rank is the first of its engine."""
        return self.rank % self.engine_parallel == 0

    @property
    def prompts_multiple(self) -> int:
        """What the number of prompts must be a multiple of."""
        return self.ranks // min(self._sizes)

    def drawn(self, prompts: Sequence[T]) -> Sequence[T]:
        """What this rank's engine draws responses to."""
        size = len(prompts) // self.engines
        return prompts[self.engine * size : (self.engine + 1) * size]

    def learnt(self, parts: Sequence[Rollout]) -> Rollout:
        """What this rank learns from.

        Args:
            parts: What each rank of its group has drawn, in their order; one if nothing but the data is shared.
        """
        whole = reduce(add, parts[:: self.engine_parallel])
        learners = max(1, self.engine_parallel // self.training_parallel)
        place = self.rank % self.engine_parallel // self.training_parallel
        size = len(whole) // learners
        if learners == 1:
            return whole
        mine = whole.select(list(range(place * size, (place + 1) * size)))
        return mine if place == 0 else replace(mine, reward_timeouts=0, reward_errors=0)  # which count once

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.training_parallel, self.engine_parallel
