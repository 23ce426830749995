"""Group advantages: how much better a response is than its siblings."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, *, normalize_std: bool = True) -> Tensor:
    """GRPO's advantages ``A_i = (R_i - mean_G R) / (std_G R + 1e-6)``, with the unbiased std (paper, section 3).

    Args:
        rewards: One for each response, the responses of a prompt side by side; NaN where there is none. (B,) float
        group_size: Responses to a prompt, G.
        normalize_std: Whether to divide by the std; without it this is Dr. GRPO's advantage.

    Returns:
        Advantages, (B,) float32. A response without a reward gets 0 and does not count in its group's statistics.
    """
    groups = rewards.float().view(-1, group_size)
    scored = ~groups.isnan()
    count = scored.sum(-1, keepdim=True)
    values = groups.where(scored, 0.0)
    centred = (values - values.sum(-1, keepdim=True) / count.clamp(min=1)).where(scored, 0.0)
    # Rewards such as 0.1 + 0.2 and 0.3 are equal: what is left of their difference must not be blown up to +-1.
    centred = centred.where(centred.abs() > 1e-6 * values.abs().amax(-1, keepdim=True), 0.0)
    if normalize_std:
        std = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + 1e-6)
    return torch.flatten(centred)
