"""Sequences of different lengths side by side in one row, without padding, within a budget of tokens.

The responses to a prompt that are in one row share it: all but the attention passes over its tokens once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dclightning.attention import Lanes, lanes
from dclightning.rollout.types import Rollout


@dataclass(frozen=True)
class Pack:
    """A micro-batch: N input tokens of several sequences in one row, and the R response tokens they predict."""

    input_ids: Tensor
    """Prompts, each once, and responses without their last tokens, which predict nothing. (1, N) int64"""
    position_ids: Tensor
    """Of each token in its sequence, from 0. (1, N) int64"""
    lanes: list[Lanes]
    """Which tokens belong to one sequence."""
    predictors: Tensor
    """Which input token predicts each response token. (R,) int64"""
    targets: Tensor
    """The response tokens. (R,) int64"""
    index: Tensor
    """Where each of them stands among the rollout's response tokens. (R,) int64"""
    response_lengths: Tensor
    """Response tokens of each sequence, in the row's order. (B,) int64"""
    experts: Tensor | None = None
    """The experts that the engine chose for each input token. (N, layers, k) int16"""


def pack(rollout: Rollout, sequences: list[int]) -> Pack:
    """Put the given sequences of a rollout into one row, from the longest to the shortest."""
    prompts, responses = rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist()
    starts, offsets = rollout.sequence_starts.tolist(), rollout.response_starts.tolist()
    sequences = sorted(sequences, key=lambda i: -(prompts[i] + max(responses[i] - 1, 0)))
    taken, positions = [], []  # tokens of the rollout, and where in their sequences they are
    places = []  # of each sequence's tokens in the row
    shared: dict[int, Tensor] = {}
    size = 0

    def place(start: int, position: int, count: int) -> Tensor:
        nonlocal size
        taken.append(_range(start, count))
        positions.append(_range(position, count))
        size += count
        return _range(size - count, count)

    for i in sequences:
        if (prompt := rollout.prompt_of[i]) not in shared:
            shared[prompt] = place(starts[i], 0, prompts[i])
        rest = place(starts[i] + prompts[i], prompts[i], max(responses[i] - 1, 0))
        places.append(torch.cat([shared[prompt], rest]))
    device = rollout.token_ids.device
    inputs = _joined(taken).to(device)
    predictors = [row[prompts[i] - 1 :][: responses[i]] for i, row in zip(sequences, places, strict=True)]
    targets = [_range(starts[i] + prompts[i], responses[i]) for i in sequences]
    return Pack(
        input_ids=rollout.token_ids[inputs][None],
        position_ids=_joined(positions).to(device)[None],
        lanes=lanes(places, device),
        predictors=_joined(predictors).to(device),
        targets=rollout.token_ids[_joined(targets).to(device)],
        index=_joined([_range(offsets[i], responses[i]) for i in sequences]).to(device),
        response_lengths=rollout.response_lengths[sequences],
        experts=None if rollout.experts is None else rollout.experts[inputs],
    )


def _range(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])


def plan(rollout: Rollout, steps: int, budget: int, most: Callable[[Tensor], Tensor]) -> list[list[Pack]]:
    """For each optimizer step its micro-batches: the same number on every rank, as sharded models need.

    Args:
        rollout: Whose sequences the steps share evenly.
        steps: Optimizer steps.
        budget: Most tokens in a micro-batch.
        most: Gives the elementwise maximum over ranks.
    """
    size = len(rollout) // steps
    lengths = (rollout.prompt_lengths + rollout.response_lengths).split(size)
    counts = most(torch.tensor([len(micro_batches(part.tolist(), budget)) for part in lengths])).tolist()
    batches = [micro_batches(part.tolist(), budget, count) for part, count in zip(lengths, counts, strict=True)]
    return [[pack(rollout, [step * size + i for i in batch]) for batch in batches[step]] for step in range(steps)]


def micro_batches(lengths: list[int], budget: int, count: int = 1) -> list[list[int]]:
    """Cut sequences into micro-batches of at most ``budget`` tokens, as even as a greedy choice makes them.

    Args:
        lengths: Tokens of each sequence.
        budget: Most tokens in a micro-batch. A longer sequence gets one of its own.
        count: The fewest micro-batches to make, at least 1. Ranks that share a model must all make the same number.

    Returns:
        Indices into ``lengths``, each once. No micro-batch is empty unless there are fewer sequences than ``count``.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(count, min(-(-sum(lengths) // budget), len(lengths)))
    while True:
        batches: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        for i in longest_first:
            lightest = loads.index(min(loads))
            batches[lightest].append(i)
            loads[lightest] += lengths[i]
        if max(loads) <= budget or count >= len(lengths):
            return [sorted(batch) for batch in batches]
        count += 1
