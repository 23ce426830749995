"""What a rollout engine has to do. One engine samples for one data-parallel rank."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from dclightning.rollout.types import Completion, Sampling

Finished = Callable[[int, list[Completion]], None]
"""Takes the place of a prompt and the responses to it."""


class RolloutEngine(Protocol):
    """Samples responses from the inference policy."""

    version: int
    """Training steps that the engine's weights have seen."""

    def start(self, model: str, max_length: int) -> None:
        """Load the model, once; sequences will have at most ``max_length`` tokens, prompt included."""

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        group_size: int,
        seed: int,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """Draw ``group_size`` responses to each prompt, those of a prompt side by side.

        The result depends on the weights and the arguments alone. If the engine can tell, ``finished`` is called
        once for each prompt, as soon as all responses to it are there.
        """

    def distributions(self, contexts: list[list[int]], temperature: float) -> Tensor:
        """The next token's log-probabilities after each context, (contexts, vocabulary) float32."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, given by their names in the model's own checkpoint."""

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of weights that the engine holds otherwise than given, as far as it can tell."""

    def make_room(self) -> None:
        """Free what memory can be freed until weights are loaded the next time; nothing is asked before."""

    def interrupt(self) -> None:
        """Make a :meth:`generate` that runs in another thread give up with an exception, soon if it can."""

    def close(self) -> None:
        """Free what the engine holds; it can be started again."""
