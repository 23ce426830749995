"""Reinforcement learning for language models when the engine that samples is not the engine that trains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dclightning.module import AdamW, GRPOModule
    from dclightning.policy_loss import PolicyLoss
    from dclightning.rewards.math import MathReward
    from dclightning.rollout.datamodule import RolloutDataModule
    from dclightning.rollout.types import Completion, Rollout, Sampling
    from dclightning.rollout.vllm import VLLMEngine
    from dclightning.strategies import ParallelStrategy

__version__ = "0.1.0"

_WHERE = {
    "AdamW": "dclightning.module",
    "Completion": "dclightning.rollout.types",
    "GRPOModule": "dclightning.module",
    "MathReward": "dclightning.rewards.math",
    "ParallelStrategy": "dclightning.strategies",
    "PolicyLoss": "dclightning.policy_loss",
    "Rollout": "dclightning.rollout.types",
    "RolloutDataModule": "dclightning.rollout.datamodule",
    "Sampling": "dclightning.rollout.types",
    "VLLMEngine": "dclightning.rollout.vllm",
}
__all__ = [
    "AdamW",
    "Completion",
    "GRPOModule",
    "MathReward",
    "ParallelStrategy",
    "PolicyLoss",
    "Rollout",
    "RolloutDataModule",
    "Sampling",
    "VLLMEngine",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import dclightning`` itself costs nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
