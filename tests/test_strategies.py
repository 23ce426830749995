"""Layouts that cannot be are refused before any weight is read."""

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from dclightning.errors import UserError
from dclightning.strategies import check_layout

DENSE = Qwen3Config(num_attention_heads=8, num_key_value_heads=2)
EXPERTS = Qwen3MoeConfig(num_attention_heads=8, num_key_value_heads=4, num_experts=16)


@pytest.mark.parametrize(
    ("config", "ranks", "tp", "ep"),
    [
        (DENSE, 8, 1, 1),
        (DENSE, 8, 2, 1),
        (EXPERTS, 8, 1, 1),
        (EXPERTS, 8, 1, 8),
        (EXPERTS, 32, 2, 8),  # the paper's
        (EXPERTS, 4, 2, 2),
    ],
)
def test_what_fits_is_taken(config, ranks, tp, ep):
    check_layout(config, ranks, tp, ep)


@pytest.mark.parametrize(
    ("config", "ranks", "tp", "ep", "reason"),
    [
        (DENSE, 8, 4, 1, "tensor_parallel_size=4: must divide the model's num_key_value_heads, 2"),
        (DENSE, 6, 3, 1, "tensor_parallel_size=3: must divide the model's num_attention_heads, 8"),
        (DENSE, 8, 1, 2, "expert_parallel_size=2: the model has no experts"),
        (EXPERTS, 12, 1, 3, "expert_parallel_size=3: must divide the 16 experts and the 12 ranks"),
        (EXPERTS, 8, 1, 16, "expert_parallel_size=16: must divide the 16 experts and the 8 ranks"),
        (EXPERTS, 8, 2, 1, "expert_parallel_size=1: must be a multiple of tensor_parallel_size=2"),
        (EXPERTS, 8, 4, 2, "expert_parallel_size=2: must be a multiple of tensor_parallel_size=4"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(config, ranks, tp, ep, reason):
    with pytest.raises(UserError, match=reason):
        check_layout(config, ranks, tp, ep)
