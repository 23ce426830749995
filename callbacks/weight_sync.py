"""After each training step the engine gets the trainer's weights."""

from typing import Any

import lightning as L

from dclightning.models import named_weights
from dclightning.phases import phases


class WeightSync(L.Callback):
    """Pushes the policy's weights into the rollout engine: at the start, and after each training step."""

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The evaluation before the first step sees the policy that is trained."""
        self.push(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The engine loaded the model's own files; a resumed run's weights are others."""
        self.push(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The next rollout is sampled with the weights of now."""
        self.push(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """``validate`` evaluates the checkpoint's weights."""
        if trainer.state.fn != "fit":
            self.push(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A checkpoint's weights are calibrated with."""
        self.push(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """``test`` evaluates the checkpoint's weights."""
        self.push(trainer, pl_module)

    def push(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Give the engine the weights of now; for callbacks that change them, too."""
        version = trainer.fit_loop.total_batch_idx + 1  # batches are counted from 0
        with phases("sync"):
            trainer.datamodule.engine.load_weights(named_weights(pl_module.model), version)  # type: ignore[attr-defined]
