"""Attention over packed sequences: each token sees the earlier tokens of its own sequence.

transformers' own way for packed rows is a mask of all tokens against all tokens, which costs time and memory with the
square of the micro-batch. Here sequences of similar length are laid side by side, padded to the longest of them (at
most twofold), so that plain causal attention serves each. Only the attention itself sees padding; and it alone sees
again, for each of its responses, a prompt that the row has once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from dclightning.errors import UserError

PACKED = "dclightning_packed"
"""The name under which transformers knows :func:`packed_attention`."""


@dataclass(frozen=True)
class Lanes:
    """Sequences of similar length as lanes of one length."""

    lay: Tensor
    """For each place of the lanes, the token of the row that stands there; behind a lane's end, any. (S, T) int64"""
    pick: Tensor
    """For each token that no earlier lanes had, in the row's order, its place in the flattened lanes. int64"""


def lanes(sequences: Sequence[Tensor], device: torch.device) -> list[Lanes]:
    """Divide the sequences of a row into lanes.

    Args:
        sequences: Where in the row the tokens of each stand, (tokens,) int64, from the longest to the shortest. Those
            that an earlier sequence has, too, come first in it; the others follow all that are in earlier ones.
        device: Where the lanes will be.
    """
    groups: list[Lanes] = []
    seen = first = 0
    while first < len(sequences):
        longest = len(sequences[first])
        group = list(takewhile(lambda s: longest >= len(s) >= longest / 2, sequences[first:]))  # noqa: B023
        lay = pad_sequence(group, batch_first=True)
        sizes = torch.tensor([len(s) for s in group])
        fresh = (torch.arange(lay.shape[1]) < sizes[:, None]) & (lay >= seen)
        places = fresh.flatten().nonzero().flatten()
        tokens, firsts = np.unique(lay[fresh].numpy(), return_index=True)
        groups.append(Lanes(lay.to(device), places[torch.from_numpy(firsts)].to(device)))
        seen, first = seen + len(tokens), first + len(group)
    return groups


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    lanes: list[Lanes] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of one row, with the signature that transformers calls.

    Args:
        module: The attention layer.
        query: (1, heads, N, size), and so are key and value, whose heads may be fewer.
        key: See query.
        value: See query.
        attention_mask: Always None; lanes tell sequences apart.
        scaling: Factor of the scores.
        lanes: The row's sequences, from :func:`lanes`.
        sliding_window: How many tokens back a token sees, itself included.
        softcap: Not supported.
        s_aux: Not supported.
        **kwargs: Ignored. Dropout is among them; ``load_policy`` has turned it off.

    Returns:
        (1, N, heads, size), and no attention weights.
    """
    if lanes is None:
        raise ValueError(f"{PACKED} needs lanes; for plain batches call model.set_attn_implementation('sdpa')")
    if softcap is not None or s_aux is not None:
        raise UserError(f"model: the attention of {type(module).__name__} (soft cap or sinks) is not supported")
    attended = []
    for group in lanes:
        count, length = group.lay.shape
        window = None
        if sliding_window is not None and sliding_window < length:
            back = torch.arange(length, device=query.device)
            back = back[:, None] - back
            window = (back >= 0) & (back < sliding_window)
        q, k, v = (  # (S, heads, T, size)
            row[0].index_select(1, group.lay.flatten()).unflatten(1, (count, length)).transpose(0, 1)
            for row in (query, key, value)
        )
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        attended.append(out.transpose(1, 2).flatten(0, 1).index_select(0, group.pick))
    return torch.cat(attended)[None], None


AttentionInterface.register(PACKED, packed_attention)
