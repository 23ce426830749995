"""Rollouts to be looked at."""

from pathlib import Path
from typing import Any

import lightning as L

from dclightning.records import records, write_records


class SavedRollouts(L.Callback):
    """Writes responses with what both policies said of each token, for ``dclightning inspect``.

    The files are ``rollouts/ROLLOUT.jsonl`` in the run's folder, of rank 0's share.

    Args:
        every_n_rollouts: How often.
        responses: How many of a rollout: the first groups, as far as they go. 0 writes nothing.
    """

    def __init__(self, every_n_rollouts: int = 10, responses: int = 32) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts={every_n_rollouts}: must be at least 1")
        if responses < 0:
            raise ValueError(f"responses={responses}: must not be negative")
        self.every_n_rollouts = every_n_rollouts
        self.responses = responses

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Ask for the tokens' ranks, which are not computed otherwise."""
        wanted = self.responses > 0 and trainer.fit_loop.total_batch_idx % self.every_n_rollouts == 0
        pl_module.ranks_wanted |= wanted and trainer.is_global_zero

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write them, on rank 0."""
        step = trainer.fit_loop.total_batch_idx
        folder, tokenizer = trainer.log_dir, getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if step % self.every_n_rollouts or not trainer.is_global_zero or None in (folder, tokenizer):
            return
        chosen = range(min(self.responses, len(batch)))
        rows = records(batch, outputs["scores"], tokenizer, chosen)
        write_records(Path(str(folder)) / "rollouts" / f"{step:06}.jsonl", rows)
