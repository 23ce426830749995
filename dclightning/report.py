"""``dclightning report``: what a run has achieved, from its TensorBoard log."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dclightning.errors import UserError

ROWS = {
    "mean reward": "train/reward",
    "mean discrepancy δ̄": "discrepancy/sequence_mean",
    "multiplier λ": "lagrangian/multiplier",
}


def main(arguments: list[str]) -> None:
    """Print the table of a run."""
    parser = argparse.ArgumentParser(prog="dclightning report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, or one that holds runs: then the newest")
    run = newest_run(parser.parse_args(arguments[1:]).run)
    print_report(run, read_scalars(run))


def newest_run(folder: Path) -> Path:
    """The folder of the newest TensorBoard log, in a folder or below it, that has a rollout in it."""
    for log in sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime, reverse=True):
        if "train/reward" in read_scalars(log.parent):
            return log.parent
    raise UserError(f"run={str(folder)!r}: no rollout was logged there")


def read_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every scalar of a run; of a step logged twice, the first (step 0: before training)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {
        tag: sorted({event.step: event.value for event in reversed(log.Scalars(tag))}.items())
        for tag in log.Tags()["scalars"]
    }


def measures_of(tags: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """What is measured on a benchmark, without the ends of intervals: tag, benchmark, policy and measure."""
    for tag in tags:
        stage, *parts = tag.split("/")
        if stage in ("val", "test") and len(parts) == 3:
            yield tag, parts[0], parts[1], parts[2]


def print_report(run: Path, scalars: dict[str, list[tuple[int, float]]]) -> None:
    """Print first and last values, where things are, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(scalars.get('train/reward', []))} rollouts", title_justify="left")
    table.add_column("")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    for tag, benchmark, policy, metric in sorted(measures_of(scalars)):
        if not metric.startswith("avg@"):
            continue
        whose = "deployed less training" if "-" in policy else f"of the {policy} policy"
        _add_row(table, f"{benchmark}: {metric} {whose}", scalars[tag])
    parts = [tag for tag in scalars if tag.startswith("reward/") and tag not in ("reward/timeouts", "reward/errors")]
    of_parts = {f"mean {tag.removeprefix('reward/')}": tag for tag in parts} if len(parts) > 1 else {}
    for label, tag in (ROWS | of_parts).items():
        if tag in scalars:
            _add_row(table, label, scalars[tag])
    console = Console(soft_wrap=True)
    console.print(table)
    folder = os.path.relpath(run)
    last = run / "checkpoints" / "last.ckpt"
    console.print(f"run          {folder}", highlight=False)
    console.print(f"log          {folder}/run.log", highlight=False)
    if last.exists():
        console.print(f"checkpoints  {folder}/checkpoints", highlight=False)
    scripts = Path(sys.executable).parent
    prefix = f"{scripts.relative_to(Path.cwd())}/" if scripts.is_relative_to(Path.cwd()) else ""
    console.print("\nnext:", highlight=False)
    console.print(f"  {prefix}tensorboard --logdir {os.path.relpath(run.parent)}", highlight=False)
    if last.exists():
        command, resume = f"{prefix}dclightning", f"--config {folder}/config.yaml --ckpt_path {os.path.relpath(last)}"
        console.print(f"  {command} validate {resume}", highlight=False)
        console.print(f"  {command} fit {resume}", "  # if it was interrupted", highlight=False)
        console.print(f"  {command} fit {resume} --trainer.max_epochs 2", "  # for a second epoch", highlight=False)


def _add_row(table: object, label: str, series: list[tuple[int, float]]) -> None:
    table.add_row(label, f"{series[0][1]:.4g}", f"{series[-1][1]:.4g}")  # type: ignore[attr-defined]
