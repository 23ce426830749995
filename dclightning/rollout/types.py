"""What passes between the rooms: sampling settings, completions, and rollouts (one training step's batch)."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_tokens: int = 8192
    """Longest response, in tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")

    @property
    def covers_all_tokens(self) -> bool:
        """Whether every token can be drawn with the probability that the trainer computes."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k <= 0 and self.min_p == 0


@dataclass
class Completion:
    """One response as the engine sampled it."""

    token_ids: list[int]
    """The sampled tokens, the end-of-sequence token included."""
    logprobs: list[float]
    """Log-probability of each of them under the inference policy, at the sampling temperature."""
    finish_reason: Literal["stop", "length"]
    """``length`` if the response was cut off."""
    text: str = ""
    """The decoded response, for rewards and for people; training never sees it."""
    ranks: list[int] = field(default_factory=list)
    """How many tokens were likelier under the inference policy, and 1, for each of them; empty if it does not tell."""
    experts: Tensor | None = None
    """The experts that the engine chose for each token of prompt and response but the last, in each layer.
    (tokens, layers, k) int16"""


def gathered_experts(completions: list[Completion]) -> Tensor | None:
    """The experts of all tokens of some sequences, -1 for each one's last; None if the engine does not tell them."""
    parts = [completion.experts for completion in completions]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) < len(parts):
        raise RuntimeError(f"{len(parts) - len(known)} of {len(parts)} responses have no experts, the others do")
    return torch.cat([torch.cat([part, part.new_full((1, *part.shape[1:]), -1)]) for part in known])


@dataclass(frozen=True)
class Scores:
    """What B completions got."""

    total: Tensor
    """The sum of the parts, each times its weight; NaN where one that has a weight is missing. (B,) float32"""
    parts: dict[str, Tensor]
    """By name each reward, before its weight; NaN where it could not score. (B,) float32"""
    timeouts: int = 0
    """Verdicts that took too long."""
    errors: int = 0
    """Failed verdicts, and completions for which a reward raised an exception or gave no number."""


_OF_SEQUENCES = ("prompt_lengths", "response_lengths", "rewards", "truncated", "weight_versions")
_OF_RESPONSE_TOKENS = ("rollout_logprobs", "rollout_ranks")


@dataclass
class Rollout:
    """The responses of one training step: ragged, so everything that belongs to tokens is flat.

    B sequences of N tokens in all, R of them response tokens. The responses to one prompt are side by side.
    """

    token_ids: Tensor
    """Prompt and response of each sequence, one sequence after another. (N,) int64"""
    prompt_lengths: Tensor
    """(B,) int64"""
    response_lengths: Tensor
    """(B,) int64"""
    rollout_logprobs: Tensor
    """Log-probability of each response token under the inference policy. (R,) float32"""
    rollout_ranks: Tensor
    """Its rank there, from 1; 0 if the engine does not tell. (R,) int64"""
    rewards: Tensor
    """NaN where a response could not be scored. (B,) float32"""
    truncated: Tensor
    """Whether the response was cut off. (B,) bool"""
    group_size: int
    """Responses to a prompt."""
    temperature: float
    """Sampling temperature; the training policy's logits are divided by it, too."""
    max_tokens: int
    """The longest response that was allowed."""
    weight_versions: Tensor
    """Training steps that the weights which sampled each response had seen. (B,) int64"""
    experts: Tensor | None = None
    """The experts that the engine chose for each token in each layer, -1 where that is not known: then the trainer uses
    them, too. (N, layers, k) int16"""
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    """By name the rewards that ``rewards`` is the weighted sum of. (B,) float32 each"""
    reward_timeouts: int = 0
    """Verdicts that took too long."""
    reward_errors: int = 0
    """Verdicts that failed."""
    discarded_groups: int = 0
    """Groups that were drawn for this rollout and thrown away, since all their rewards were equal."""
    seconds: float = 0.0
    """How long drawing and scoring took."""

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        completions: list[Completion],
        scores: Scores,
        sampling: Sampling,
        group_size: int,
        weight_version: int,
    ) -> "Rollout":
        """What an engine and a scorer gave.

        Args:
            prompts: Token ids.
            completions: ``group_size`` responses to each prompt, side by side.
            scores: Of the completions.
            sampling: How they were drawn.
            group_size: Responses to a prompt.
            weight_version: Of the engine's weights.
        """
        prompts = [ids for ids in prompts for _ in range(group_size)]
        return cls(
            token_ids=torch.tensor(
                [token for ids, c in zip(prompts, completions, strict=True) for token in (*ids, *c.token_ids)]
            ),
            prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
            response_lengths=torch.tensor([len(c.token_ids) for c in completions]),
            rollout_logprobs=torch.tensor([logprob for c in completions for logprob in c.logprobs]),
            rollout_ranks=torch.tensor(
                [rank for c in completions for rank in c.ranks or [0] * len(c.token_ids)], dtype=torch.int64
            ),
            rewards=scores.total,
            truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
            group_size=group_size,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            weight_versions=torch.full((len(completions),), weight_version),
            experts=gathered_experts(completions),
            reward_parts=scores.parts,
            reward_timeouts=scores.timeouts,
            reward_errors=scores.errors,
        )

    @property
    def sequence_starts(self) -> Tensor:
        """Where each sequence starts in ``token_ids``. (B,) int64"""
        lengths = self.prompt_lengths + self.response_lengths
        return lengths.cumsum(0) - lengths

    @property
    def response_starts(self) -> Tensor:
        """Where each response starts among the response tokens. (B,) int64"""
        return self.response_lengths.cumsum(0) - self.response_lengths

    @cached_property
    def prompt_of(self) -> list[int]:
        """For each sequence the first one that has the same prompt; for many that is the sequence itself.

        With experts, these must be the same, too: what engines keep of a prompt ends before its last tokens.
        """
        firsts: dict[tuple[bytes, ...], int] = {}
        values = [v.cpu().numpy() for v in (self.token_ids, self.experts) if v is not None]
        places = zip(self.sequence_starts.tolist(), self.prompt_lengths.tolist(), strict=True)
        prompts = [tuple(v[at : at + count].tobytes() for v in values) for at, count in places]
        return [firsts.setdefault(prompt, i) for i, prompt in enumerate(prompts)]

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Prompt and response ids of each sequence."""
        parts = torch.stack([self.prompt_lengths, self.response_lengths], dim=1).flatten().tolist()
        pieces = self.token_ids.split(parts)
        return list(zip(pieces[::2], pieces[1::2], strict=True))

    def select(self, chosen: list[int]) -> "Rollout":
        """Some of the sequences, in the order given; whole groups of them."""
        sequences, lengths = self.sequences(), self.response_lengths.tolist()

        def tokens(values: Tensor) -> Tensor:
            parts = values.split(lengths)
            return torch.cat([parts[i] for i in chosen])

        picked: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _OF_SEQUENCES}
        picked |= {name: tokens(getattr(self, name)) for name in _OF_RESPONSE_TOKENS}
        if self.experts is not None:
            whole = self.experts.split((self.prompt_lengths + self.response_lengths).tolist())
            picked["experts"] = torch.cat([whole[i] for i in chosen])
        return replace(
            self,
            token_ids=torch.cat([part for i in chosen for part in sequences[i]]),
            reward_parts={name: part[chosen] for name, part in self.reward_parts.items()},
            **picked,
        )

    def __add__(self, other: "Rollout") -> "Rollout":
        """The sequences of both, which were drawn alike."""
        experts = () if self.experts is None else ("experts",)
        names = ("token_ids", *experts, *_OF_RESPONSE_TOKENS, *_OF_SEQUENCES)
        both: dict[str, Any] = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in names}
        parts = {name: torch.cat([part, other.reward_parts[name]]) for name, part in self.reward_parts.items()}
        return replace(
            self,
            reward_parts=parts,
            reward_timeouts=self.reward_timeouts + other.reward_timeouts,
            reward_errors=self.reward_errors + other.reward_errors,
            discarded_groups=self.discarded_groups + other.discarded_groups,
            seconds=max(self.seconds, other.seconds),
            **both,
        )

    def __len__(self) -> int:
        return len(self.rewards)

    def to(self, *args: Any, **kwargs: Any) -> "Rollout":
        """Move every tensor; takes what ``torch.Tensor.to`` takes."""
        moved: dict[str, Any] = {
            field.name: value.to(*args, **kwargs)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        parts = {name: part.to(*args, **kwargs) for name, part in self.reward_parts.items()}
        return replace(self, reward_parts=parts, **moved)
