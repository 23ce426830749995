"""Responses with what both policies say of each token, as JSON lines: what is kept to be looked at."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dclightning.errors import UserError
from dclightning.ragged import spread
from dclightning.rollout.types import Rollout


@dataclass(frozen=True)
class Record:
    """One response of a rollout; what belongs to tokens has one entry for each token of the response."""

    rollout: int
    """Training steps that the weights had seen which sampled it."""
    prompt: str
    tokens: list[str]
    """Each token decoded by itself."""
    token_ids: list[int]
    train_logprobs: list[float]
    """Log-probability of the token under the training policy."""
    rollout_logprobs: list[float]
    """And under the inference policy, which sampled it."""
    train_ranks: list[int]
    """How many tokens the training policy finds likelier, and 1."""
    rollout_ranks: list[int]
    """And the inference policy; empty if the engine does not tell."""
    entropy: list[float]
    """Of the training policy's distribution, in nats."""
    reward: float | None
    """None if the response could not be scored."""
    truncated: bool


def records(rollout: Rollout, scores: Sequence[Tensor], tokenizer: Any, chosen: Sequence[int]) -> Iterator[Record]:
    """Some of a rollout's responses.

    Args:
        rollout: With R response tokens.
        scores: What the training policy said of them before the update: a :class:`~dclightning.models.TokenScores`.
        tokenizer: Decodes.
        chosen: Which responses, in ascending order.
    """
    tokens = spread(torch.isin(torch.arange(len(rollout)), torch.tensor(chosen)), rollout.response_lengths.cpu())
    logprobs, entropy, ranks = (part.cpu()[tokens] for part in scores)
    rollout = replace(rollout, experts=None).to("cpu").select(list(chosen))
    sequences, lengths = rollout.sequences(), rollout.response_lengths.tolist()
    columns = (logprobs, rollout.rollout_logprobs, entropy)
    floats = [[[float(f"{x:.7g}") for x in part.tolist()] for part in column.split(lengths)] for column in columns]
    whole = [[part.tolist() for part in column.split(lengths)] for column in (ranks, rollout.rollout_ranks)]
    for i in range(len(lengths)):
        prompt, response = (ids.tolist() for ids in sequences[i])
        reward = float(rollout.rewards[i])
        yield Record(
            rollout=int(rollout.weight_versions[i]),
            prompt=tokenizer.decode(prompt),
            tokens=tokenizer.batch_decode([[token] for token in response]),
            token_ids=response,
            train_logprobs=floats[0][i],
            rollout_logprobs=floats[1][i],
            train_ranks=whole[0][i],
            rollout_ranks=whole[1][i] if any(whole[1][i]) else [],
            entropy=floats[2][i],
            reward=None if reward != reward else reward,
            truncated=bool(rollout.truncated[i]),
        )


def write_records(path: Path, some: Iterable[Record], append: bool = False) -> None:
    """One JSON object on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in some)


def read_records(path: Path) -> list[Record]:
    """What :func:`write_records` wrote.

    Raises:
        UserError: If a line is something else.
    """
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Record(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path}, line {number}: no response of a run or calibration ({error})") from error
    return found
