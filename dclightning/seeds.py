"""Every random choice derives from the run's seed and from what it is for, so nothing random needs to be saved."""

import random
from hashlib import sha256

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """An independent seed below 2**32 for one purpose, such as ``derive_seed(0, "rollout", step, rank)``."""
    return int.from_bytes(sha256(repr((seed, *purpose)).encode()).digest()[:4], "big")


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
