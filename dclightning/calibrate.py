"""``dclightning calibrate``: the discrepancy with fixed weights, before a run, and a budget for it.

Takes what ``fit`` takes: the run's own problems, prompts, sampling, engine, precision and strategy. With
``--ckpt_path`` a checkpoint's weights are measured, else the model's. The folder OUTPUT gets the numbers
(``calibration.json``), a config to lay over the run's own (``budget.yaml``), a figure (``calibration.png``) and the
responses, for ``dclightning inspect`` (``responses.jsonl``).
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor

from dclightning.calibration import Tokens, describe, describe_divergences, propose
from dclightning.callbacks.lagrangian import LagrangianCallback, MeanKind
from dclightning.callbacks.penalty import Penalty
from dclightning.discrepancy import DiscrepancyKind, divergences
from dclightning.errors import UserError
from dclightning.models import TokenScores, distributions, reshard
from dclightning.ragged import spread
from dclightning.records import records, write_records
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.types import Rollout
from dclightning.routing import replayed
from dclightning.seeds import derive_seed
from dclightning.strategies import data_parallel_gather

MULTIPLIER, ALARM = "dclightning.callbacks.LagrangianCallback", "dclightning.callbacks.StaleWeights"
KEPT = 64
"""Responses of each rollout that are kept to be looked at."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what follows from it."""

    tokens: Tokens
    """Of all rollouts and ranks."""
    divergences: dict[str, Tensor]
    """Between whole distributions, at some positions; see :func:`~dclightning.discrepancy.divergences`."""
    kind: DiscrepancyKind
    """Which of the discrepancies the run charges for."""
    aggregation: MeanKind
    """Which mean of it the run's multiplier looks at."""
    slack: float

    def report(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return {
            "kind": self.kind,
            "aggregation": self.aggregation,
            "proposal": propose(self.tokens, self.kind, self.aggregation, self.slack),
            **describe(self.tokens),
            "divergences": describe_divergences(self.divergences),
        }


def calibrate(
    trainer: L.Trainer,
    module: Any,
    datamodule: Any,
    ckpt_path: str | None = None,
    weights_only: bool | None = None,
    rollouts: int = 4,
    slack: float = 0.2,
    positions: int = 256,
    output: Path | None = None,
) -> Calibration:
    """Draw rollouts and score them with both policies; nothing is learnt.

    Args:
        trainer: With a ``WeightSync`` callback, if a checkpoint is to be measured.
        module: The training policy.
        datamodule: The problems and the engine.
        ckpt_path: The checkpoint to take the weights from.
        weights_only: How it is loaded; see ``Trainer.predict``.
        rollouts: How many; more measure the floor and the tail better.
        slack: How far the budget is above the floor, as a share of it.
        positions: At how many positions of each rollout whole distributions are compared.
        output: A folder for the responses.

    Raises:
        UserError: If there is not a single token to measure.
    """
    for name, number in (("rollouts", rollouts), ("positions", positions)):
        if number < 1:
            raise UserError(f"{name}={number}: must be at least 1")
    if not slack >= 0:
        raise UserError(f"slack={slack}: must not be negative")
    collector = _Collector(positions, output)
    predict(trainer, module, datamodule, rollouts, collector, ckpt_path=ckpt_path, weights_only=weights_only)
    tokens, found = collector.results()
    if len(tokens.logprobs) == 0:
        raise UserError(
            "calibrate: there is no token to measure: all responses are empty, or truncated and masked; "
            "see sampling.max_tokens and prompt_template"
        )
    multipliers = [c for c in trainer.callbacks if isinstance(c, LagrangianCallback)]  # type: ignore[attr-defined]
    aggregation = multipliers[0].aggregation if multipliers else "sequence"
    return Calibration(tokens, found, module.discrepancy, aggregation, slack)


def predict(
    trainer: L.Trainer, module: Any, datamodule: Any, rollouts: int, callback: L.Callback, **options: Any
) -> None:
    """Score some rollouts under a callback, and leave everything as it was."""
    limit, step = trainer.limit_predict_batches, datamodule.step
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    trainer.limit_predict_batches = rollouts
    try:
        trainer.predict(module, datamodule, return_predictions=False, **options)
    finally:
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
        trainer.limit_predict_batches, datamodule.step = limit, step


class _Collector(L.Callback):
    """Keeps what both policies say of each token, and compares whole distributions at some of them."""

    def __init__(self, positions: int, output: Path | None) -> None:
        self.positions = positions
        self.output = output
        self.parts: dict[str, list[Tensor]] = defaultdict(list)

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: TokenScores,
        batch: Rollout,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take a rollout in."""
        counted = ~batch.truncated if pl_module.overlong.mask else torch.ones_like(batch.truncated)
        tokens, groups = spread(counted, batch.response_lengths), torch.arange(len(batch)) // batch.group_size
        seen = {
            "logprobs": outputs.logprobs[tokens],
            "rollout_logprobs": batch.rollout_logprobs[tokens],
            "entropy": outputs.entropy[tokens],
            "lengths": batch.response_lengths[counted],
            "groups": (groups + len(batch) * trainer.datamodule.shares.replica).to(counted.device)[counted],  # type: ignore[attr-defined]
        }
        for name, values in {**seen, **self._compare(trainer, pl_module, batch, batch_idx)}.items():
            self.parts[name].append(data_parallel_gather(trainer.strategy, values).cpu())
        # Groups of different rollouts are different.
        self.parts["groups"][-1] += batch_idx * len(batch) * trainer.world_size
        if self.output is not None and trainer.is_global_zero:
            tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
            rows = records(batch, outputs, tokenizer, range(min(len(batch), KEPT)))
            write_records(self.output / "responses.jsonl", rows, append=batch_idx > 0)

    def _compare(self, trainer: L.Trainer, module: Any, rollout: Rollout, batch_idx: int) -> dict[str, Tensor]:
        """The divergences at positions that are drawn from all response tokens."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        seed = derive_seed(datamodule.seed, "positions", batch_idx, datamodule.shares.replica)
        order = torch.randperm(len(rollout.rollout_logprobs), generator=torch.Generator().manual_seed(seed))
        return compared(module, datamodule.engine, rollout, order[: self.positions])

    def results(self) -> tuple[Tokens, dict[str, Tensor]]:
        """Everything, of all ranks."""
        whole = {name: torch.cat(parts) for name, parts in self.parts.items()}
        tokens = Tokens(*(whole.pop(name) for name in Tokens.__dataclass_fields__))
        return tokens, whole


def compared(module: Any, engine: RolloutEngine, rollout: Rollout, chosen: Tensor) -> dict[str, Tensor]:
    """The divergences of both policies' whole distributions where some response tokens stand, in any order.

    The engine is given what comes before each of them as a prompt.

    Args:
        module: The training policy. Every rank must call it.
        engine: The inference policy.
        rollout: With R response tokens.
        chosen: Which of them. (N,) int64
    """
    chosen = chosen.to(rollout.token_ids.device).sort().values
    theirs = engine.distributions(contexts(rollout, chosen), rollout.temperature)
    found: list[dict[str, Tensor]] = []
    for pack in (pack for mini in module.plan(rollout) for pack in mini):  # each rank has as many of them
        here = torch.isin(pack.index, chosen)
        part = replace(pack, predictors=pack.predictors[here], targets=pack.targets[here], index=pack.index[here])
        with replayed(module.model, part.experts):
            ours = distributions(module.model, part, rollout.temperature)
        places = torch.searchsorted(chosen, part.index)
        found.append(divergences(ours, theirs[places.cpu()].to(ours.device)))
    reshard(module.model)
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def contexts(rollout: Rollout, chosen: Tensor) -> list[list[int]]:
    """For each of some response tokens, what comes before it."""
    sequences, starts = rollout.sequences(), rollout.response_starts
    chosen = chosen.to(starts.device)
    owners = torch.searchsorted(starts + rollout.response_lengths, chosen, right=True)  # empty responses own nothing
    before = []
    for owner, place in zip(owners.tolist(), (chosen - starts[owners]).tolist(), strict=True):
        prompt, response = sequences[owner]
        before.append([*prompt.tolist(), *response[:place].tolist()])
    return before


def write(calibration: Calibration, callbacks: Any, output: Path) -> dict[str, Any]:
    """Write the numbers, the overlay and the figure; returns the numbers.

    Args:
        calibration: What was measured.
        callbacks: ``trainer.callbacks`` of the run's config, which the overlay repeats with the budget and the floor.
        output: The folder.
    """
    report = calibration.report()
    output.mkdir(parents=True, exist_ok=True)
    (output / "calibration.json").write_text(json.dumps(report, indent=2) + "\n")
    (output / "budget.yaml").write_text(overlay(callbacks, report["proposal"]))
    figure(calibration, report).savefig(output / "calibration.png", dpi=120)
    return report


def overlay(callbacks: Any, proposal: dict[str, float]) -> str:
    """A config that lays the budget and the floor over a run's callbacks.

    The multiplier is added, before all others, unless there is another penalty; the alarm is added behind them. The
    alarm gets no floor of zero.
    """
    listed = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    found: list[dict[str, Any]] = [{"class_path": c} if isinstance(c, str) else dict(c) for c in listed]
    names = [callback["class_path"].rpartition(".")[2] for callback in found]
    penalties = {kind.__name__ for kind in Penalty.__subclasses__()}
    if not penalties & set(names):
        found.insert(0, {"class_path": MULTIPLIER})
    if "StaleWeights" not in names:
        found.append({"class_path": ALARM})
    for callback in found:
        name, given = callback["class_path"].rpartition(".")[2], dict(callback.get("init_args") or {})
        if name == "LagrangianCallback":
            callback["init_args"] = {**given, "budget": proposal["budget"]}
        elif name == "StaleWeights" and proposal["floor"] > 0:
            callback["init_args"] = {**given, "floor": float(f"{proposal['floor']:.3g}")}
    text = (
        f"# Measured with fixed weights: a mean discrepancy of {proposal['floor']:.3g} "
        f"(95 % interval {proposal['low']:.3g} to {proposal['high']:.3g}).\n"
        f"# The budget is that and {proposal['slack']:.0%} slack. It holds for this model, engine and sampling.\n"
        "# Comes after the run's own config, whose list of callbacks it repeats; --trainer.callbacks+= goes after it.\n"
    )
    return text + str(yaml.safe_dump({"trainer": {"callbacks": found}}, sort_keys=False))


def figure(calibration: Calibration, report: dict[str, Any]) -> Any:
    """Six views of the discrepancy."""
    from matplotlib.figure import Figure

    tokens, kind = calibration.tokens, calibration.kind
    drawn = Figure(figsize=(14, 8), layout="constrained")
    drawn.suptitle(f"{report['responses']} responses, {report['tokens']} tokens")
    axes = drawn.subplots(2, 3).flatten()
    p, q = tokens.logprobs.exp(), tokens.rollout_logprobs.exp()
    axes[0].hexbin(q, p, gridsize=60, bins="log", extent=(0, 1, 0, 1), mincnt=1)
    axes[0].plot([0, 1], [0, 1], linewidth=0.5, color="gray")
    axes[0].set(xlabel="p_inf of the sampled token", ylabel="p_train", title="both policies")
    for name in report["discrepancy"]:
        delta = tokens.delta(name).sort().values.clamp_min(1e-9)
        share = 1 - torch.arange(len(delta)) / len(delta)
        axes[1].loglog(delta, share, label=name)
    axes[1].axvline(report["proposal"]["budget"], linestyle=":", color="gray", label="proposed budget")
    axes[1].set(xlabel="δ", ylabel="share of tokens above", title="tail", xlim=(1e-6, None))
    axes[1].legend()
    bins = (("by_position", "position in the response"), ("by_probability", "p_inf"), ("by_entropy", "entropy, nats"))
    for axis, (key, label) in zip(axes[2:5], bins, strict=True):
        rows = report[key]
        axis.bar([f"{row['from']:g} to {row['to']:g}" for row in rows], [row[kind] for row in rows])
        axis.tick_params(axis="x", rotation=30)
        axis.set(xlabel=label, ylabel=f"mean δ ({kind})", title=f"by {label.split(',')[0]}")
    rows = report["by_prefix"]
    axes[5].loglog([row["tokens"] for row in rows], [row["log_weight"] for row in rows], marker="o")
    axes[5].set(xlabel="first n tokens", ylabel="RMS of Σ log p_train / p_inf", title="log importance weight")
    return drawn


def show(report: dict[str, Any]) -> None:
    """Print the numbers that matter most."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table(title=f"{report['responses']} responses, {report['tokens']} tokens", title_justify="left")
    columns = next(iter(report["discrepancy"].values()))
    for column in ("discrepancy", *columns):
        table.add_column(column, justify="left" if column == "discrepancy" else "right")
    for kind, row in report["discrepancy"].items():
        table.add_row(kind + (" *" if kind == report["kind"] else ""), *(f"{x:.2g}" for x in row.values()))
    console.print(table)
    whole = Table(title="whole distributions", title_justify="left")
    for column in ("", "mean", "p99", "max"):
        whole.add_column(column, justify="left" if not column else "right")
    for name, row in report["divergences"].items():
        whole.add_row(name, *(f"{row[key]:.4g}" if key in row else "" for key in ("mean", "p99", "max")))
    console.print(whole)
    mine = report["proposal"]
    if mine["high"] - mine["low"] > mine["slack"] * mine["floor"]:
        print("The floor is known less well than the slack allows for: draw more with --rollouts")
    print(
        f"floor {mine['floor']:.3g} (95 % interval {mine['low']:.3g} to {mine['high']:.3g}), "
        f"budget {mine['budget']:.3g}: the floor and {mine['slack']:.0%} slack (*: what the run charges for)"
    )
