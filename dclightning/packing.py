"""Sequences of different lengths side by side in one row, without padding, within a budget of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dclightning.rollout.types import Rollout


@dataclass(frozen=True)
class Pack:
    """A micro-batch: N input tokens of several sequences in one row, and the R response tokens they predict."""

    input_ids: Tensor
    """Prompts and responses, each without its last token, which predicts nothing. (1, N) int64"""
    position_ids: Tensor
    """Positions that start at 0 in each sequence. (1, N) int64"""
    boundaries: Tensor
    """Where each of the S sequences starts in the row, and the row's length. (S + 1,) int64"""
    predictors: Tensor
    """Which input token predicts each response token. (R,) int64"""
    targets: Tensor
    """The response tokens. (R,) int64"""
    index: Tensor
    """Where each of them stands among the rollout's response tokens. (R,) int64"""


def pack(rollout: Rollout, sequences: list[int]) -> Pack:
    """Put the given sequences of a rollout into one row."""
    prompts, responses = rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist()
    starts, offsets = rollout.sequence_starts.tolist(), rollout.response_starts.tolist()
    device = rollout.token_ids.device
    inputs, positions, predictors, index, boundaries, used = [], [], [], [], [0], 0
    for i in sequences:
        length = prompts[i] + responses[i] - 1
        inputs.append(torch.arange(starts[i], starts[i] + length))
        positions.append(torch.arange(length))
        predictors.append(torch.arange(responses[i]) + used + prompts[i] - 1)
        index.append(torch.arange(responses[i]) + offsets[i])
        used += length
        boundaries.append(used)
    predicted = torch.cat(predictors).to(device)
    taken = torch.cat(inputs).to(device)
    return Pack(
        input_ids=rollout.token_ids[taken][None],
        position_ids=torch.cat(positions).to(device)[None],
        boundaries=torch.tensor(boundaries, device=device),
        predictors=predicted,
        targets=rollout.token_ids[taken[predicted] + 1],
        index=torch.cat(index).to(device),
    )


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
