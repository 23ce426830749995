"""Reinforcement learning for language models when the engine that samples is not the engine that trains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dclightning.corrections import (
        GeometricMask,
        SequenceMIS,
        SequenceTIS,
        TokenMIS,
        TokenTIS,
        TrustRegionMask,
        Veto,
    )
    from dclightning.lora import LoRA
    from dclightning.module import GRPOModule, Overlong
    from dclightning.optimizer import AdamW
    from dclightning.policy_loss import CISPO, DPPO, GSPO, PolicyLoss, PPOClip
    from dclightning.reference_kl import ReferenceKL
    from dclightning.rewards.math import MathReward
    from dclightning.rollout.datamodule import RolloutDataModule
    from dclightning.rollout.remote import RemoteEngine
    from dclightning.rollout.transformers import TransformersEngine
    from dclightning.rollout.types import Completion, Rollout, Sampling
    from dclightning.rollout.vllm import VLLMEngine
    from dclightning.strategies import FabricParallelStrategy, ParallelStrategy

__version__ = "0.1.0"

_WHERE = {
    "AdamW": "dclightning.optimizer",
    "CISPO": "dclightning.policy_loss",
    "Completion": "dclightning.rollout.types",
    "Correction": "dclightning.corrections",
    "DPPO": "dclightning.policy_loss",
    "FabricParallelStrategy": "dclightning.strategies",
    "GeometricMask": "dclightning.corrections",
    "GRPOModule": "dclightning.module",
    "GSPO": "dclightning.policy_loss",
    "LoRA": "dclightning.lora",
    "MathReward": "dclightning.rewards.math",
    "Overlong": "dclightning.module",
    "ParallelStrategy": "dclightning.strategies",
    "PolicyLoss": "dclightning.policy_loss",
    "PPOClip": "dclightning.policy_loss",
    "ReferenceKL": "dclightning.reference_kl",
    "RemoteEngine": "dclightning.rollout.remote",
    "Rollout": "dclightning.rollout.types",
    "RolloutDataModule": "dclightning.rollout.datamodule",
    "Sampling": "dclightning.rollout.types",
    "SequenceMIS": "dclightning.corrections",
    "SequenceTIS": "dclightning.corrections",
    "TokenMIS": "dclightning.corrections",
    "TokenTIS": "dclightning.corrections",
    "TransformersEngine": "dclightning.rollout.transformers",
    "TrustRegionMask": "dclightning.corrections",
    "Veto": "dclightning.corrections",
    "VLLMEngine": "dclightning.rollout.vllm",
}
__all__ = [
    "AdamW",
    "CISPO",
    "Completion",
    "Correction",
    "DPPO",
    "FabricParallelStrategy",
    "GeometricMask",
    "GRPOModule",
    "GSPO",
    "LoRA",
    "MathReward",
    "Overlong",
    "ParallelStrategy",
    "PolicyLoss",
    "PPOClip",
    "ReferenceKL",
    "RemoteEngine",
    "Rollout",
    "RolloutDataModule",
    "Sampling",
    "SequenceMIS",
    "SequenceTIS",
    "TokenMIS",
    "TokenTIS",
    "TransformersEngine",
    "TrustRegionMask",
    "Veto",
    "VLLMEngine",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import dclightning`` itself costs nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
