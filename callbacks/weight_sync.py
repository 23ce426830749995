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

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The engine loaded the model's own files; a resumed run's weights are others.

        One step off, the next rollout is sampled with the weights before the last update.
        """
        if pl_module.sampling_policy is None:
            self.push(trainer, pl_module)
        else:
            self._load(trainer, pl_module.sampling_policy, pl_module.sampling_version)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """And the one after that, with the weights of now."""
        version = trainer.fit_loop.total_batch_idx
        if pl_module.sampling_policy is not None and trainer.datamodule.engine.version != version:  # type: ignore[attr-defined]
            self._load(trainer, pl_module.model, version)

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
        """Give the engine the weights of now."""
        self._load(trainer, pl_module.model, trainer.fit_loop.total_batch_idx + 1)  # batches are counted from 0

    def restart(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The same for callbacks that change the weights: what was sampled ahead with others is thrown away."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        datamodule.ahead.cancel(datamodule.engine.interrupt)
        if pl_module.sampling_policy is not None:
            pl_module.follow(trainer.fit_loop.total_batch_idx + 1)
        self.push(trainer, pl_module)

    def _load(self, trainer: L.Trainer, model: Any, version: int) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        datamodule.ahead.wait()
        with phases("sync"):
            datamodule.engine.load_weights(named_weights(model), version)
