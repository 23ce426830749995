"""What is composed with the module: the multiplier, weight sync, checkpoints, progress."""

from dclightning.callbacks.adaptive_budget import AdaptiveBudget
from dclightning.callbacks.checkpoint import RolloutCheckpoint
from dclightning.callbacks.evaluations import Evaluations
from dclightning.callbacks.fixed_penalty import FixedPenalty
from dclightning.callbacks.histograms import Histograms
from dclightning.callbacks.lagrangian import LagrangianCallback
from dclightning.callbacks.progress import RolloutProgress
from dclightning.callbacks.tail_penalty import TailPenalty
from dclightning.callbacks.weight_sync import WeightSync

__all__ = [
    "AdaptiveBudget",
    "Evaluations",
    "FixedPenalty",
    "Histograms",
    "LagrangianCallback",
    "RolloutCheckpoint",
    "RolloutProgress",
    "TailPenalty",
    "WeightSync",
]
