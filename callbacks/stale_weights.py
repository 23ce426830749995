"""An alarm for an engine that samples with other weights than the trainer's."""

import logging
import math
from collections import deque
from statistics import median
from typing import Any, Literal

import lightning as L
import torch

from dclightning.callbacks.order import check_comes_after_multiplier
from dclightning.discrepancy import sequence_mean
from dclightning.errors import RunStoppedError, check_choice
from dclightning.models import named_weights
from dclightning.trends import SMALLEST

Action = Literal["warn", "stop"]

log = logging.getLogger(__name__)


class StaleWeights(L.Callback):
    """Looks whether each rollout was sampled with the weights of its step, in two ways that do not trust the sync.

    Checksums of the weights that the engine holds are compared with the trainer's before each update; of those that are
    quantised or repacked it cannot tell. And the mean discrepancy right after a sync must not be far over what is
    usual: the calibrated floor, or the median of the latest rollouts if that is higher, for a discrepancy that rises
    slowly is what the multiplier is for. (That the engine's version is the step's, the module always checks.)

    ``guard/discrepancy_over_usual`` is logged. List it after the callbacks that move the multiplier or its budget.

    Args:
        floor: The mean discrepancy with fixed weights, from ``dclightning calibrate``. Without it, the first
            ``warmup`` rollouts say what is usual.
        factor: How many times what is usual is too much.
        compare_weights: Whether to compare weights. With sharded models it costs as much as another sync.
        action: ``warn``, or ``stop`` the run between two rollouts, with a checkpoint.
        window: How many rollouts are the latest.
        warmup: How many there must be to say what is usual, if there is no floor.
    """

    def __init__(
        self,
        floor: float | None = None,
        factor: float = 5.0,
        compare_weights: bool = True,
        action: Action = "warn",
        window: int = 20,
        warmup: int = 5,
    ) -> None:
        if floor is not None and not floor > 0:
            raise ValueError(f"floor={floor}: must be positive")
        if not factor > 1:
            raise ValueError(f"factor={factor}: must be above 1")
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup={warmup}: must be at least 1 and at most window={window}")
        check_choice("action", action, Action)
        self.floor = floor
        self.factor = factor
        self.compare_weights = compare_weights
        self.action = action
        self.warmup = warmup
        self.latest: deque[float] = deque(maxlen=window)
        self._different: list[str] = []

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a place in the list where a stop would leave the multiplier behind."""
        check_comes_after_multiplier(self, trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Compare the engine's weights with those of now, which it has, or else has been left behind."""
        self._different = []
        if not self.compare_weights:
            return
        engine = trainer.datamodule.engine  # type: ignore[attr-defined]
        # One step off, a resumed run's engine may still have those that its first rollout was sampled with.
        if pl_module.sampling_policy is None or engine.version != pl_module.sampling_version:
            self._different = engine.differing_weights(named_weights(pl_module.model))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sound the alarm on all ranks, if one of them has a reason."""
        mean = sequence_mean(outputs["delta"], outputs["response_lengths"]).item()  # the same on all ranks
        usual = self.usual()
        pl_module.log("guard/discrepancy_over_usual", mean / usual)
        if math.isfinite(mean):
            self.latest.append(mean)
        where = f"Rollout {trainer.fit_loop.total_batch_idx}"
        count = torch.tensor(len(self._different), device=pl_module.device)
        if differing := int(trainer.strategy.reduce(count, reduce_op="sum")):
            first = f", such as {self._different[0]}" if self._different else ", on another rank"
            self._alarm(f"Stale weights in the engine: {where}: {differing} are not the trainer's{first}")
        elif mean > self.factor * usual:
            agree = "; the weights that can be compared agree" if self.compare_weights else ""
            self._alarm(
                f"Stale weights in the engine? {where}: the mean discrepancy is {mean:.3g}, usual is {usual:.3g}{agree}"
            )

    def usual(self) -> float:
        """What is usual; NaN as long as that is not known."""
        if self.floor is None and len(self.latest) < self.warmup:
            return math.nan
        return max(self.floor or 0.0, median(self.latest) if self.latest else 0.0, SMALLEST)

    def _alarm(self, line: str) -> None:
        if self.action == "stop":
            raise RunStoppedError(line)
        log.warning(line)

    def state_dict(self) -> dict[str, Any]:
        """The latest discrepancies."""
        return {"latest": list(self.latest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.latest.clear()
        self.latest.extend(state_dict["latest"])
