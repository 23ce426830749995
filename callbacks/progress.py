"""What the run is doing, on one line."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dclightning.phases import phases

STAGES = {"rollout": "generating", "reward": "scoring", "score": "scoring", "update": "updating", "sync": "syncing"}
SHOWN = {"train/reward": "reward", "discrepancy/sequence_mean": "δ̄", "lagrangian/multiplier": "λ"}


class RolloutProgress(ProgressBar):
    """Stage, rollouts done, time left, reward, mean discrepancy and multiplier.

    Where the output is no terminal it prints a line now and then instead.

    Args:
        lines: How many lines to print over the run where there is no terminal.
    """

    def __init__(self, lines: int = 20) -> None:
        super().__init__()
        if lines < 1:
            raise ValueError(f"lines={lines}: must be at least 1")
        self.lines = lines
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._enabled = True

    def disable(self) -> None:
        """Show nothing: Lightning asks this of all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self.console.print(*args)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say why nothing is trained yet."""
        if self._enabled:
            self.console.print("evaluating the deployed policy before training", highlight=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put up the bar."""
        if not self._enabled or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rollouts"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self.console,
        )
        done = trainer.fit_loop.total_batch_idx + 1
        self._task = self._progress.add_task("starting", total=_rollouts(trainer), completed=done, values="")
        self._progress.start()
        phases.listener = self._show_stage

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar, or print a line."""
        done, total = trainer.fit_loop.total_batch_idx + 1, _rollouts(trainer)
        metrics = trainer.callback_metrics
        values = "  ".join(f"{label} {float(metrics[name]):.4g}" for name, label in SHOWN.items() if name in metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=done, values=values)
        elif self._enabled and (done == 1 or done == total or done % math.ceil((total or 100) / self.lines) == 0):
            self.console.print(f"rollout {done}/{total or '?'}  {values}", highlight=False, soft_wrap=True)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say that the policy is evaluated."""
        if self._progress is not None:
            phases.listener = None
            self._show_stage("evaluating")
        elif self._enabled and not trainer.sanity_checking:
            self.console.print("evaluating the deployed policy", highlight=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say again what the training does."""
        if self._progress is not None:
            phases.listener = self._show_stage

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the bar down."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Take the bar down before the error is printed."""
        self._stop()

    def _show_stage(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=STAGES.get(phase, phase))

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, phases.listener = None, None


def _rollouts(trainer: L.Trainer) -> int | None:
    """Rollouts of the whole run, if it has an end."""
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if epochs is None or epochs < 0 or math.isinf(batches):
        return None
    return int(epochs * batches)
