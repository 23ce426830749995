"""What is composed with the module: the multiplier, weight sync, checkpoints, progress."""

from dclightning.callbacks.adaptive_budget import AdaptiveBudget
from dclightning.callbacks.checkpoint import RolloutCheckpoint
from dclightning.callbacks.collapse_guard import CollapseGuard
from dclightning.callbacks.evaluations import Evaluations
from dclightning.callbacks.fixed_penalty import FixedPenalty
from dclightning.callbacks.histograms import Histograms
from dclightning.callbacks.lagrangian import LagrangianCallback
from dclightning.callbacks.progress import RolloutProgress
from dclightning.callbacks.saved_rollouts import SavedRollouts
from dclightning.callbacks.stale_weights import StaleWeights
from dclightning.callbacks.tail_penalty import TailPenalty
from dclightning.callbacks.weight_sync import WeightSync

__all__ = [
    "AdaptiveBudget",
    "CollapseGuard",
    "Evaluations",
    "FixedPenalty",
    "Histograms",
    "LagrangianCallback",
    "RolloutCheckpoint",
    "RolloutProgress",
    "SavedRollouts",
    "StaleWeights",
    "TailPenalty",
    "WeightSync",
]
