"""An eye on the run: when it collapses, a warning, the end, or a way back."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, get_args

import lightning as L

from dclightning.callbacks.checkpoint import RolloutCheckpoint
from dclightning.callbacks.lagrangian import LagrangianCallback
from dclightning.callbacks.order import check_comes_after_multiplier
from dclightning.callbacks.weight_sync import WeightSync
from dclightning.errors import RunStoppedError, UserError, check_choice
from dclightning.trends import Trend

Action = Literal["warn", "stop", "rollback"]
Watched = Literal["reward", "entropy", "discrepancy", "response_length"]

TRENDS: dict[Watched, Trend] = {
    "reward": Trend("train/reward", falls="the reward falls", by_ratio=False),
    "entropy": Trend("train/entropy", falls="the entropy collapses", rises="the entropy explodes"),
    "discrepancy": Trend("discrepancy/sequence_mean", rises="the discrepancy runs away"),
    "response_length": Trend("train/response_length", falls="responses become short", rises="responses become long"),
}

log = logging.getLogger(__name__)


class CollapseGuard(L.Callback):
    """Compares a run's latest rollouts with those before them, and acts when a trend breaks for the worse.

    A metric's deviation is how far the median of its last ``patience`` values is from the median of the ``window``
    values before them, in units of how those scatter (:func:`dclightning.trends.deviation`). A steady trend makes them
    scatter, too, and deviates by less than 2, however steep it is: it is the break that is found. What lasts becomes
    usual, and what takes longer than the window is not seen; such a collapse takes a longer window. Deviations are
    logged as ``guard/<name>``; those of a good run say how far ``threshold`` may be lowered.

    - ``warn`` says once what is seen, and again only after the deviation was under half the threshold.
    - ``stop`` ends the run between two rollouts, with a checkpoint.
    - ``rollback`` puts weights and momenta back to the newest good checkpoint of :class:`RolloutCheckpoint`, raises the
      multiplier of a :class:`LagrangianCallback` above what it was there, and goes on with the next problems. Neither
      the data nor the learning rate is turned back; what the guard remembers is. Without a good checkpoint, the run
      stops.

    A checkpoint is good if, ``patience`` rollouts later, all deviations were under half the threshold, or were not
    judged yet. The slower a collapse, the more checkpoints must be kept to find one from before it: more than the two
    that :class:`RolloutCheckpoint` keeps by default.

    List it after the callbacks that move the multiplier or its budget.

    Args:
        action: What to do.
        watch: Which trends are watched: a reward that falls, an entropy or a response length that falls or rises, a
            discrepancy that rises.
        window: How many values are looked back on.
        warmup: How many of them there must be; until then nothing is judged.
        patience: How many values are the latest. More than half of them must be off.
        threshold: The deviation that is too much.
        least_spread: Values are taken to scatter by at least this share of the usual value: at 0.05 and a threshold of
            8, a reward must fall by 40 % and the others by a factor of 1.5, even if they never moved before.
        raise_multiplier: The factor that each rollback raises the multiplier by, within its bounds.
        least_multiplier: What a rollback raises it to at least, within its bounds: it may have been 0.
        max_rollbacks: How many there may be in a run.
    """

    def __init__(
        self,
        action: Action = "warn",
        watch: Sequence[Watched] = ("reward", "entropy", "discrepancy", "response_length"),
        window: int = 50,
        warmup: int = 20,
        patience: int = 5,
        threshold: float = 8.0,
        least_spread: float = 0.05,
        raise_multiplier: float = 2.0,
        least_multiplier: float = 0.1,
        max_rollbacks: int = 3,
    ) -> None:
        check_choice("action", action, Action)
        for name in watch:
            check_choice("watch", name, Watched)
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup={warmup}: must be at least 1 and at most window={window}")
        if patience < 1:
            raise ValueError(f"patience={patience}: must be at least 1")
        if not threshold > 0:
            raise ValueError(f"threshold={threshold}: must be positive")
        if not least_spread >= 0:
            raise ValueError(f"least_spread={least_spread}: must not be negative")
        if not raise_multiplier >= 1:
            raise ValueError(f"raise_multiplier={raise_multiplier}: must be at least 1")
        if not least_multiplier >= 0:
            raise ValueError(f"least_multiplier={least_multiplier}: must not be negative")
        if max_rollbacks < 0:
            raise ValueError(f"max_rollbacks={max_rollbacks}: must not be negative")
        self.action = action
        self.trends = {name: TRENDS[name] for name in get_args(Watched) if name in watch}
        self.window = window
        self.warmup = warmup
        self.patience = patience
        self.threshold = threshold
        self.least_spread = least_spread
        self.raise_multiplier = raise_multiplier
        self.least_multiplier = least_multiplier
        self.max_rollbacks = max_rollbacks
        self.rollbacks = 0
        """How many there were."""
        self.last_good = 0
        """The newest optimizer step (Lightning's ``global_step``) whose weights have proved good."""
        self._abandoned: list[list[int]] = []  # what rollbacks left behind: from a step to a step, both themselves good
        self._warned: list[str] = []
        self._remember({})

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is computed."""
        check_comes_after_multiplier(self, trainer)
        self._checkpoints = [c for c in trainer.callbacks if isinstance(c, RolloutCheckpoint)]
        if self.action == "rollback" and stage == "fit" and not self._checkpoints:
            raise UserError("action='rollback': CollapseGuard goes back to checkpoints of a RolloutCheckpoint; add one")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the rollout's numbers in and judge the trends; all of it is the same on every rank."""
        self._steps.append(trainer.global_step)
        for name, trend in self.trends.items():
            value = float(trainer.callback_metrics.get(trend.metric, math.nan))
            if math.isfinite(value):
                self._values[name].append(value)
        deviations = {name: self._deviation(name) for name in self.trends}
        pl_module.log_dict({f"guard/{name}": deviation for name, deviation in deviations.items()})
        suspicions, faults = (self._faults(deviations, threshold) for threshold in (self.threshold / 2, self.threshold))
        if not suspicions and len(self._steps) > self.patience:
            self.last_good = max(self.last_good, self._steps[0])
        lines = {name: self._line(name, fault, deviations[name]) for name, fault in faults.items()}
        for line in (line for name, line in lines.items() if name not in self._warned):
            log.warning("Rollout %d: %s", trainer.fit_loop.total_batch_idx, line)
        self._warned = [name for name in suspicions if name in faults or name in self._warned]
        if faults and self.action != "warn":
            self._act(trainer, pl_module, "; ".join(lines.values()))

    def _split(self, name: Watched) -> tuple[list[float], list[float]]:
        """The usual values, and the latest."""
        values = list(self._values[name])
        return values[: -self.patience], values[-self.patience :]

    def _deviation(self, name: Watched) -> float:
        """NaN as long as too little is known."""
        usual, latest = self._split(name)
        if len(usual) < self.warmup:
            return math.nan
        return self.trends[name].deviation(usual, latest, self.least_spread)

    def _faults(self, deviations: dict[Watched, float], threshold: float) -> dict[Watched, str]:
        found = {name: trend.fault(deviations[name], threshold) for name, trend in self.trends.items()}
        return {name: fault for name, fault in found.items() if fault}

    def _line(self, name: Watched, fault: str, deviation: float) -> str:
        usual, latest = map(median, self._split(name))
        return f"{fault}: {self.trends[name].metric} is {latest:.4g}, usual is {usual:.4g} ({deviation:+.3g} spreads)"

    def _act(self, trainer: L.Trainer, pl_module: L.LightningModule, line: str) -> None:
        """Stop, or roll back as long as that is possible."""
        saved = {int(step): path for c in self._checkpoints for path, step in c.best_k_models.items()}
        left = [step for step in saved for low, high in self._abandoned if low < step < high]
        good = [step for step in saved if step <= self.last_good and step not in left]
        where = f"rollout {trainer.fit_loop.total_batch_idx}: {line}"
        if self.action == "stop":
            found = f"the newest good checkpoint is {saved[max(good)]}" if good else "no good checkpoint is left"
            raise RunStoppedError(f"action='stop': {where}; {found}")
        if self.rollbacks >= self.max_rollbacks:
            raise RunStoppedError(f"max_rollbacks={self.max_rollbacks}: {where}")
        if not good:
            why = "no good checkpoint is left: keep more of them (checkpoint.keep)"
            why = why if saved else "there is no checkpoint yet: save more often (checkpoint.every_n_rollouts)"
            raise RunStoppedError(f"action='rollback': {where}; {why}")
        step = max(good)
        states = restore_policy(trainer, saved[step])["callbacks"]
        self.rollbacks += 1
        self._abandoned.append([step, trainer.global_step])
        self._remember(states.get(self.state_key, {}))
        log.warning("Rollback %d of at most %d, to %s", self.rollbacks, self.max_rollbacks, saved[step])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LagrangianCallback):
                self._raise_multiplier(callback, states.get(callback.state_key, {}).get("multiplier", 0.0))
            elif isinstance(callback, WeightSync):
                callback.restart(trainer, pl_module)

    def _raise_multiplier(self, callback: LagrangianCallback, before: float) -> None:
        """Above what it was at the checkpoint, for the collapse may have driven it anywhere; each time further."""
        raised = max(before * self.raise_multiplier**self.rollbacks, self.least_multiplier)
        callback.multiplier = min(raised, callback.bounds[1])
        log.warning("The multiplier was %g there, and is now %g", before, callback.multiplier)

    def _remember(self, state: dict[str, Any]) -> None:
        """Set the past to that of a state; an empty one has none."""
        length, past = self.window + self.patience, state.get("values", {})
        self._values = {name: deque(past.get(name, ()), length) for name in self.trends}
        self._steps = deque(state.get("steps", ()), self.patience + 1)
        self._warned = list(state.get("warned", ()))

    def state_dict(self) -> dict[str, Any]:
        """The past that the next rollouts are compared with, and what was done."""
        return {
            "values": {name: list(values) for name, values in self._values.items()},
            "steps": list(self._steps),
            "warned": self._warned,
            "last_good": self.last_good,
            "abandoned": self._abandoned,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._remember(state_dict)
        self.last_good = state_dict["last_good"]
        self._abandoned = list(state_dict["abandoned"])
        self.rollbacks = state_dict["rollbacks"]


def restore_policy(trainer: L.Trainer, path: str) -> dict[str, Any]:
    """Put weights, momenta and what the module adds to a checkpoint back, in place, in the middle of a run.

    The optimizers' settings, the learning rate among them, stay those of now. To be called on all ranks.

    Args:
        trainer: In the middle of a run.
        path: The run's own checkpoint.

    Returns:
        What else is in the checkpoint.
    """
    strategy = trainer.strategy
    groups = [group for optimizer in strategy.optimizers for group in optimizer.param_groups]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    # Sharded strategies restore both in the first call, and do nothing in the others.
    checkpoint = strategy.load_checkpoint(path, weights_only=False)
    trainer.lightning_module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=trainer.lightning_module.strict_loading)
    strategy.load_optimizer_state_dict(checkpoint)
    groups = [group for optimizer in strategy.optimizers for group in optimizer.param_groups]
    for group, setting in zip(groups, settings, strict=True):
        group.update(setting)
    return checkpoint
