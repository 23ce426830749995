"""``dclightning plan``: whether a run fits its GPUs, and how long a step takes, from its config alone.

Takes the options of ``fit``. Of the model only the config is read, and nothing is started, neither a GPU nor an engine.
Exits with 1 if the run does not fit.
"""

import sys
from types import SimpleNamespace
from typing import Any

from jsonargparse import ArgumentError
from lightning import Trainer
from rich.console import Console
from rich.table import Table

from dclightning.cli import DCLightningCLI, catch_logs
from dclightning.doctor import GIB
from dclightning.errors import UserError, one_line
from dclightning.estimate import PHASES, Plan, estimate
from dclightning.module import GRPOModule
from dclightning.rollout.datamodule import RolloutDataModule
from dclightning.step_time import GPUName


class PlanTrainer(Trainer):
    """Lightning's, whose options a run's config has. It is never made: it would look for its GPUs."""

    def plan(
        self,
        model: GRPOModule,
        datamodule: RolloutDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        gpu: GPUName = "H100",
        response_length: int | None = None,
        mfu: float = 0.4,
        bandwidth_utilization: float = 0.6,
    ) -> Plan:
        """Estimate memory and time from the config alone.

        Args:
            model: The training policy.
            datamodule: The problems and the engine.
            ckpt_path: As in ``fit``, whose saved configs have it; nothing is read.
            weights_only: As in ``fit``, whose saved configs have it.
            gpu: What the run is to have.
            response_length: Mean tokens of a response; by default half of the longest.
            mfu: Share of the GPU's operations a second that is reached.
            bandwidth_utilization: Share of its bytes a second that is reached, of memory and links.
        """
        return estimate(self, model, datamodule, gpu, response_length, mfu, bandwidth_utilization)


class PlanCLI(DCLightningCLI):
    """Builds the module and the data of a run, which starts nothing, but no trainer."""

    def before_instantiate_classes(self) -> None:
        """There is no checkpoint to find."""

    def instantiate_classes(self) -> None:
        """Build all but the trainer."""
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UserError(one_line(error)) from error
        self.model, self.datamodule = self._get(self.config_init, "model"), self._get(self.config_init, "data")

    def _run_subcommand(self, subcommand: str) -> None:
        options = self._get(self.config_init, "trainer")
        ranks = device_count(options.devices) * options.num_nodes
        trainer: Any = SimpleNamespace(strategy=options.strategy, world_size=ranks)
        kwargs = self._prepare_subcommand_kwargs(subcommand)
        found = PlanTrainer.plan(trainer, **kwargs)
        show(found, kwargs["gpu"], ranks)
        if not found.fits:
            sys.exit(1)


def main(arguments: list[str]) -> None:
    """Plan a run with its options."""
    try:
        PlanCLI(arguments, catch_logs(), PlanTrainer)
    except ArgumentError as error:
        raise UserError(one_line(error)) from error


def device_count(devices: list[int] | str | int) -> int:
    """How many devices a node has, from ``trainer.devices``."""
    if isinstance(devices, list):
        return len(devices)
    if not str(devices).isdigit() or int(devices) < 1:
        raise UserError(f"trainer.devices={devices!r}: to plan, say how many, as in --trainer.devices 8")
    return int(devices)


def show(plan: Plan, gpu: str, ranks: int) -> None:
    """Print both tables, and whether the run fits."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    memory = Table("GiB on each GPU", "update", "optimizer", "rollout", "how")
    for item in plan.items:
        sizes = (f"{item.size / GIB:.2f}" if phase in item.phases else "" for phase in PHASES)
        memory.add_row(item.name, *sizes, item.how)
    memory.add_section()
    for name, sleeps in (("engine awake", False), ("engine asleep in the update", True)):
        if any(item.of_engine for item in plan.items):
            sizes = (f"{plan.needed(phase, sleeps) / GIB:.2f}" for phase in PHASES)
            memory.add_row(f"total, {name}", *sizes, "as configured" if sleeps == plan.sleeps else "")
        elif not sleeps:
            sizes = (f"{plan.needed(phase, sleeps) / GIB:.2f}" for phase in PHASES)
            memory.add_row("total", *sizes, "without the engine, which is not vLLM's")
    memory.add_row(gpu, *3 * (f"{plan.memory / GIB:.2f}",), f"{ranks} of them")
    times = Table("a step", "s", "bound by")
    for phase in plan.times:
        times.add_row(phase.name, f"{phase.seconds:,.1f}", phase.how)
    times.add_section()
    times.add_row("total", f"{plan.seconds:,.1f}", "an estimate, one after another, without rewards")
    for table in (memory, times):
        for column in table.columns[1:-1]:
            column.justify = "right"
        console.print(table)
    if plan.fits:
        console.print(f"Fits: {-plan.excess / GIB:.1f} GiB of each GPU are left.")
        return
    too_much = [f"{plan.excess / GIB:.1f} GiB too much on each GPU"] if plan.excess > 0 else []
    for problem in [*too_much, *plan.problems]:
        console.print(f"Does not fit: {problem}.", soft_wrap=True)
    console.print("What would help:")
    for help_ in plan.helps:
        console.print(f"  {help_}", soft_wrap=True)
