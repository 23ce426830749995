"""The distributions behind the means, in TensorBoard."""

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger


class Histograms(L.Callback):
    """Writes histograms of the discrepancies and of the probability ratios.

    Args:
        every_n_rollouts: How often.
    """

    def __init__(self, every_n_rollouts: int = 10) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts={every_n_rollouts}: must be at least 1")
        self.every_n_rollouts = every_n_rollouts

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write them, on rank 0."""
        step = trainer.fit_loop.total_batch_idx
        if step % self.every_n_rollouts or not trainer.is_global_zero or len(outputs["ratio"]) == 0:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram("discrepancy/tokens", outputs["delta"].float().cpu().numpy(), step)
                logger.experiment.add_histogram("train/ratio", outputs["ratio"].float().cpu().numpy(), step)
