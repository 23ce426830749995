"""Numbers of tokens, one response after another without padding: what belongs to a response, and back.

Throughout, ``values`` has one number for each response token, (R,), and ``lengths`` the tokens of each response, (B,)
int64, which sum to R. Sums are in float64 and in a fixed order, on a GPU as well.
"""

import torch
from torch import Tensor


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each response, (B,) float64; 0 where it is empty."""
    return _reduce(values, lengths, "sum")


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each response, (B,) float64; 0 where it is empty."""
    return segment_sum(values, lengths) / lengths.clamp(min=1)


def segment_max(values: Tensor, lengths: Tensor) -> Tensor:
    """Largest number of each response, (B,) float64; minus infinity where it is empty."""
    return _reduce(values, lengths, "max")


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """Each response's number, (B,), for each of its tokens, (R,)."""
    return values.repeat_interleave(lengths)


def positions(lengths: Tensor) -> Tensor:
    """Where each token stands in its response, from 0. (R,) int64"""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - spread(starts, lengths)


def _reduce(values: Tensor, lengths: Tensor, how: str) -> Tensor:
    if len(lengths) == 0:  # which torch refuses
        return torch.zeros_like(lengths, dtype=torch.float64)
    return torch.segment_reduce(values.double(), how, lengths=lengths)
