"""Attention over packed sequences: each token sees the earlier tokens of its own sequence, and no padding is computed
outside the attention itself.

transformers' own way for packed rows is a mask of all tokens against all tokens, which costs time and memory with the
square of the micro-batch. Here the sequences are laid side by side, so that plain causal attention serves each.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dclightning.errors import UserError

PACKED = "dclightning_packed"
"""The name under which transformers knows :func:`packed_attention`."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
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
        attention_mask: Always None; sequences are told apart by their boundaries.
        scaling: Factor of the scores.
        dropout: Always 0; see ``load_policy``.
        cu_seq_lens_q: Where the sequences start in the row, and the row's length. (S + 1,) integers
        sliding_window: How many tokens back a token sees, itself included.
        softcap: Not supported.
        s_aux: Not supported.
        **kwargs: Ignored.

    Returns:
        (1, N, heads, size), and no attention weights.
    """
    if cu_seq_lens_q is None:
        raise ValueError(f"{PACKED} needs cu_seq_lens_q; for plain batches call model.set_attn_implementation('sdpa')")
    if softcap is not None or s_aux is not None:
        raise UserError(f"model: the attention of {type(module).__name__} (soft cap or sinks) is not supported")
    starts = cu_seq_lens_q[:-1]
    lengths = cu_seq_lens_q.diff()
    longest = int(lengths.max())
    steps = torch.arange(longest, device=query.device)
    real = steps < lengths[:, None]  # (S, T)
    where = (starts[:, None] + steps)[real]  # of each real token in the row

    def side_by_side(row: Tensor) -> Tensor:  # (1, heads, N, size) -> (S, heads, T, size)
        padded = row.new_zeros(len(lengths), longest, row.shape[1], row.shape[3])
        padded[real] = row[0].transpose(0, 1)[where]
        return padded.transpose(1, 2)

    window = None
    if sliding_window is not None and sliding_window < longest:
        back = steps[:, None] - steps
        window = (back >= 0) & (back < sliding_window)
    attended = scaled_dot_product_attention(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)[real][None], None


AttentionInterface.register(PACKED, packed_attention)
