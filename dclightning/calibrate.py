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
from dclightning.discrepancy import DiscrepancyKind, divergences
from dclightning.errors import UserError
from dclightning.models import TokenScores, distributions
from dclightning.records import records, write_records
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.types import Rollout
from dclightning.seeds import derive_seed
from dclightning.strategies import data_parallel_gather

MULTIPLIER, ALARM = "dclightning.callbacks.LagrangianCallback", "dclightning.callbacks.StaleWeights"


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what follows from it."""

    tokens: Tokens
    """Of all rollouts and ranks."""
    divergences: dict[str, Tensor]
    """Between whole distributions, at some positions; see :func:`~dclightning.discrepancy.divergences`."""
    kind: DiscrepancyKind
    """Which of the discrepancies the run charges for."""
    slack: float

    def report(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return {
            "kind": self.kind,
            "proposal": propose(self.tokens, self.kind, self.slack),
            **describe(self.tokens),
            "divergences": describe_divergences(self.divergences),
        }


def calibrate(
    trainer: L.Trainer,
    module: Any,
    datamodule: Any,
    ckpt_path: str | None = None,
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
    trainer.callbacks.append(collector)  # type: ignore[attr-defined]
    trainer.limit_predict_batches = rollouts
    try:
        trainer.predict(module, datamodule, ckpt_path=ckpt_path, return_predictions=False)
    finally:
        trainer.callbacks.remove(collector)  # type: ignore[attr-defined]
    tokens, found = collector.results()
    if len(tokens.logprobs) == 0:
        raise UserError("calibrate: all responses are empty; is the model a chat model, and the prompt its own?")
    return Calibration(tokens, found, module.discrepancy, slack)


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
        numbers = Tokens(outputs.logprobs, batch.rollout_logprobs, outputs.entropy, batch.response_lengths)
        for name, values in {**vars(numbers), **self._compare(trainer, pl_module, batch, batch_idx)}.items():
            self.parts[name].append(data_parallel_gather(trainer.strategy, values).cpu())
        if self.output is not None:
            rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
            tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
            rows = records(batch, outputs, tokenizer, range(len(batch)))
            write_records(self.output / f"responses{rank}.jsonl", rows, append=batch_idx > 0)

    def _compare(self, trainer: L.Trainer, module: Any, rollout: Rollout, batch_idx: int) -> dict[str, Tensor]:
        """The divergences at positions that are drawn from all response tokens."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        seed = derive_seed(datamodule.seed, "positions", batch_idx, trainer.global_rank)
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
    chosen = chosen.sort().values.to(rollout.token_ids.device)
    theirs = engine.distributions(contexts(rollout, chosen), rollout.temperature)
    found: list[dict[str, Tensor]] = []
    for pack in (pack for mini in module.plan(rollout) for pack in mini):  # each rank has as many of them
        here = torch.isin(pack.index, chosen)
        part = replace(pack, predictors=pack.predictors[here], targets=pack.targets[here], index=pack.index[here])
        ours = distributions(module.model, part, rollout.temperature)
        places = torch.searchsorted(chosen, part.index)
        found.append(divergences(ours, theirs[places.cpu()].to(ours.device)))
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def contexts(rollout: Rollout, chosen: Tensor) -> list[list[int]]:
    """For each of some response tokens, what comes before it."""
    sequences, starts = rollout.sequences(), rollout.response_starts
    owners = torch.searchsorted(starts + rollout.response_lengths, chosen, right=True)  # empty responses own nothing
    before = []
    for owner, place in zip(owners.tolist(), (chosen - starts[owners]).tolist(), strict=True):
        prompt, response = sequences[owner]
        before.append([*prompt.tolist(), *response[:place].tolist()])
    return before


def write(calibration: Calibration, callbacks: list[dict[str, Any]], output: Path) -> dict[str, Any]:
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


def overlay(callbacks: list[dict[str, Any]], proposal: dict[str, float]) -> str:
    """A config that lays the budget and the floor over a run's callbacks; both callbacks are added if missing."""
    found = [dict(callback) for callback in callbacks]
    for path, option, value in ((MULTIPLIER, "budget", proposal["budget"]), (ALARM, "floor", proposal["floor"])):
        name = path.rpartition(".")[2]
        mine = [callback for callback in found if callback["class_path"].rpartition(".")[2] == name]
        if not mine:
            mine = [{"class_path": path}]
            found += mine
        mine[0]["init_args"] = {**(mine[0].get("init_args") or {}), option: float(f"{value:.3g}")}
    text = (
        f"# Measured with fixed weights: a mean discrepancy of {proposal['floor']:.3g} "
        f"(95 % interval {proposal['low']:.3g} to {proposal['high']:.3g}).\n"
        f"# The budget is that and {proposal['slack']:.0%} slack. Comes after the run's own config.\n"
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
    rows, slope = report["by_prefix"], report["growth"]
    axes[5].loglog([row["tokens"] for row in rows], [row["log_weight"] for row in rows], marker="o")
    growth = "" if slope is None else f": length^{slope:.2f}"
    axes[5].set(xlabel="first n tokens", ylabel="RMS of Σ log p_train / p_inf", title=f"log importance weight{growth}")
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
    print(
        f"floor {mine['floor']:.3g} (95 % interval {mine['low']:.3g} to {mine['high']:.3g}), "
        f"budget {mine['budget']:.3g}: the floor and {mine['slack']:.0%} slack (*: what the run charges for)"
    )
