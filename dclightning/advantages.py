"""Advantages: how much better a response is than those it is compared with."""

from typing import Literal

import torch
from torch import Tensor

from dclightning.errors import UserError, check_choice

AdvantageKind = Literal["grpo", "no-std", "leave-one-out", "rloo", "batch-std", "batch"]


def advantages(
    rewards: Tensor, group_size: int, kind: AdvantageKind = "grpo", everyones: Tensor | None = None
) -> Tensor:
    r"""The advantage of each response; one number, which all its tokens share.

    With the mean and the unbiased standard deviation over the G responses to a prompt, and over the whole batch:

    - ``grpo``: :math:`(R_i - mean_G) / (std_G + 10^{-6})` (paper, section 3)
    - ``no-std``: :math:`R_i - mean_G` (Dr. GRPO)
    - ``leave-one-out``: as ``grpo``, but compared with the mean of the other responses
    - ``rloo``: :math:`R_i` minus the mean of the other responses (REINFORCE leave-one-out)
    - ``batch-std``: :math:`(R_i - mean_G) / (std_{batch} + 10^{-6})`
    - ``batch``: :math:`(R_i - mean_{batch}) / (std_{batch} + 10^{-6})`, which needs no siblings (REINFORCE++)

    Args:
        rewards: One for each response, the responses of a prompt side by side; NaN where there is none. (B,) float
        group_size: Responses to a prompt, G.
        kind: Which of these.
        everyones: The rewards of the batch on all ranks, in any order, where ``rewards`` is a part of it.

    Returns:
        Advantages, (B,) float32. A response without a reward gets 0 and counts in no statistics.

    Raises:
        ValueError: If responses are to be compared with siblings that they do not have.
    """
    check_group_size(group_size, kind)
    groups = rewards.double().view(-1, group_size)
    scored = ~groups.isnan()
    count = scored.sum(-1, keepdim=True)
    values = groups.where(scored, 0.0)
    batch = (rewards if everyones is None else everyones).double()
    batch = batch[~batch.isnan()]

    baseline, scale = values.sum(-1, keepdim=True) / count.clamp(min=1), values.abs().amax(-1, keepdim=True)
    if kind == "batch":
        baseline, scale = batch.mean(), batch.abs().max() if len(batch) else batch.sum()
    centred = (values - baseline).where(scored, 0.0)
    # Rewards such as 0.1 + 0.2 and 0.3 are equal: what is left of their difference must not be blown up to +-1.
    centred = centred.where(centred.abs() > 1e-6 * scale, 0.0)

    result = centred
    if kind in ("grpo", "leave-one-out"):
        std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        result = result / (std + 1e-6)
    if kind in ("leave-one-out", "rloo"):
        result = result * count / (count - 1).clamp(min=1)
    if kind in ("batch-std", "batch"):
        std = ((batch - batch.mean()).square().sum() / max(len(batch) - 1, 1)).sqrt()
        result = result / (std + 1e-6)
    return result.where(scored, 0.0).flatten().float()


def check_group_size(group_size: int, kind: AdvantageKind) -> None:
    """Refuse an unknown kind, and groups of one where siblings are the baseline; raises ValueError."""
    check_choice("advantage", kind, AdvantageKind)
    if group_size < 1:
        raise UserError(f"group_size={group_size}: must be at least 1")
    if group_size == 1 and kind != "batch":
        raise UserError(
            f"group_size={group_size}: advantage={kind!r} compares a response with its siblings, so it needs at least "
            "2; advantage='batch' compares it with the whole batch"
        )


def soft_length_penalty(lengths: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """What is taken from a long response's reward: nothing up to ``max_tokens - buffer``, then linearly up to 1 (DAPO).

    Args:
        lengths: Tokens of each response. (B,) int64
        max_tokens: The longest response that is allowed.
        buffer: The last tokens before it, over which the penalty rises; 0 takes nothing.

    Returns:
        The penalties, from 0 to 1. (B,) float32
    """
    if buffer == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return ((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)
