"""Rollouts that benchmarks train on without an engine."""

import lightning as L

from dclightning import Rollout
from dclightning.rollout.datamodule import RolloutLoader


class GivenRollouts(L.LightningDataModule):
    """Hands out given rollouts."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        super().__init__()
        self.rollouts = rollouts

    def train_dataloader(self) -> RolloutLoader:
        """All of them, in order."""
        return RolloutLoader(lambda: iter(self.rollouts), len(self.rollouts))

    def predict_dataloader(self) -> RolloutLoader:
        """The same."""
        return self.train_dataloader()
