"""Checkpoints counted in rollouts."""

import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dclightning.errors import RunStoppedError


class RolloutCheckpoint(ModelCheckpoint):
    """Saves after every n rollouts and at the end of each epoch.

    Lightning's ModelCheckpoint, of which this is one, counts optimizer steps.

    Args:
        every_n_rollouts: How often to save.
        keep: Newest checkpoints to keep; -1 keeps all.
    """

    def __init__(self, every_n_rollouts: int = 10, keep: int = 2) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts={every_n_rollouts}: must be at least 1")
        self.every_n_rollouts = every_n_rollouts
        super().__init__(
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=keep,
            save_last="link",
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,  # a run that is continued in its folder has one last.ckpt, not a last-v1.ckpt
        )
        # That the weights are those after the update is as it should be.
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed after an epoch's last rollout, a run starts a new epoch, which Lightning would not count."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step  # what was resumed from is saved
        epochs = trainer.fit_loop.epoch_progress.total
        if trainer.fit_loop.restarted_mid_epoch and epochs.completed == epochs.ready:
            trainer.fit_loop.reset_restart_stage()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if it is time, or if this was the epoch's last rollout."""
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._every_n_train_steps = 1 if last else self.every_n_rollouts * pl_module.mini_batches
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if the run ends between rollouts, by SIGTERM or for want of one: nothing computed is to be lost."""
        if (
            isinstance(exception, (SIGTERMException, RunStoppedError))
            and trainer.global_step != self._last_global_step_saved
        ):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    @property
    def state_key(self) -> str:
        """One state, however often it saves: a resumed run may choose another interval."""
        return type(self).__qualname__
