"""``dclightning fit`` and what else takes a run's config: Lightning's CLI; typed signatures are the schema."""

import logging
import os
import re
import signal
import sys
import warnings
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.checkpoint.api import CheckpointException

from dclightning.calibrate import Calibration, calibrate, show, write
from dclightning.callbacks import (
    Evaluations,
    Histograms,
    RolloutCheckpoint,
    RolloutProgress,
    SavedRollouts,
    WeightSync,
)
from dclightning.doctor import Finding
from dclightning.doctor import show as show_findings
from dclightning.errors import UserError, one_line
from dclightning.examination import examine
from dclightning.module import ONE_STEP_OFF, GRPOModule
from dclightning.report import measures_of
from dclightning.rollout.datamodule import RolloutDataModule

LOG_FILE = "run.log"

log = logging.getLogger(__name__)


class RunTrainer(Trainer):
    """Lightning's, with what else can be done with a run's config, so that it has options on the command line."""

    def calibrate(
        self,
        model: GRPOModule,
        datamodule: RolloutDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        rollouts: int = 4,
        slack: float = 0.2,
        positions: int = 256,
        output: Path = Path("calibration"),
    ) -> Calibration:
        """Measure the discrepancy with fixed weights, and propose a budget for it.

        Args:
            model: The training policy.
            datamodule: The problems and the engine.
            ckpt_path: The checkpoint to take the weights from; by default they are the model's.
            weights_only: As in ``fit``, whose saved configs have it.
            rollouts: How many are drawn; more measure the floor and the tail better.
            slack: How far the budget is above the floor, as a share of it.
            positions: At how many positions of each rollout whole distributions are compared.
            output: A folder for what is found.
        """
        return calibrate(self, model, datamodule, ckpt_path, weights_only, rollouts, slack, positions, output)

    def doctor(
        self,
        model: GRPOModule,
        datamodule: RolloutDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> list[Finding]:
        """Try what a run relies on.

        Args:
            model: The training policy.
            datamodule: The problems, the reward and the engine.
            ckpt_path: The checkpoint to take the weights from; by default they are the model's.
            weights_only: As in ``fit``, whose saved configs have it.
        """
        return examine(self, model, datamodule, ckpt_path, weights_only)


class DCLightningCLI(LightningCLI):
    """Lightning's CLI with one seed, ``--ckpt_path last`` across runs, and a log file in the run's folder."""

    def __init__(self, arguments: list[str], chatter: MemoryHandler, trainer_class: type[Trainer] = RunTrainer) -> None:
        self.chatter = chatter
        self.command = arguments[0]
        quiet = {"exit_on_error": False}
        super().__init__(
            GRPOModule,
            RolloutDataModule,
            args=arguments,
            trainer_class=trainer_class,
            save_config_callback=_SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_defaults={
                "log_every_n_steps": 1,
                "num_sanity_val_steps": -1,
                "use_distributed_sampler": False,
            },
            parser_kwargs={**quiet, **dict.fromkeys(self.subcommands(), quiet)},
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that was asked for: each takes a second to set up."""
        return {self.command: {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The callbacks of every run, one seed for all, and object defaults in a form that a saved config can hold."""
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Histograms, "histograms")
        parser.add_lightning_class_args(Evaluations, "evaluations")
        parser.add_lightning_class_args(SavedRollouts, "saved_rollouts")
        parser.add_lightning_class_args(RolloutProgress, "progress")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.set_defaults(
            {
                "data.reward": {"class_path": "dclightning.MathReward"},
                "model.loss": {"class_path": "dclightning.PPOClip"},
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Flags and configs say how to run; a checkpoint only where from (Lightning would let it override them).

        https://github.com/Lightning-AI/pytorch-lightning/issues/21455
        """

    def before_instantiate_classes(self) -> None:
        """Resolve ``--ckpt_path last``, the newest run of this name; a run is continued in its own folder."""
        config = self.config[self.subcommand]
        path, logger = config.get("ckpt_path"), config.trainer.logger
        if self.subcommand != "fit":
            config.trainer.logger = False  # what these find out is printed; a run's log is of its training
        if path is None:
            return
        checkpoint = _newest_checkpoint(logger) if path == "last" else Path(path)
        if not checkpoint.exists():
            raise UserError(f"ckpt_path={path!r}: no such file")
        config.ckpt_path = str(checkpoint)
        print(f"From checkpoint {os.path.relpath(checkpoint.resolve())}", file=sys.stderr)
        run, continued = checkpoint.parent.parent, self.subcommand == "fit" and hasattr(logger, "init_args")
        if continued and run.parent.resolve() == _runs_folder(logger).resolve():
            logger.init_args.version = run.name

    def instantiate_classes(self) -> None:
        """Build everything; a value that a class refuses is the user's to mend."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, OSError, ImportError, RuntimeError, MisconfigurationException) as error:
            raise UserError(one_line(error)) from error
        # Where the run is, only rank 0 can tell yet: the others would each find another folder.
        has_log = self.subcommand == "fit" and self.trainer.is_global_zero
        _write_log(self.chatter, self.trainer.log_dir if has_log else None)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Put the callbacks of every run around those that the config lists, save those that it lists or turns off.

        In ``trainer.callbacks`` a config says which method it is.
        """
        listed = config["callbacks"] or []
        listed = listed if isinstance(listed, list) else [listed]
        off = {Checkpoint: config["enable_checkpointing"] is False, ProgressBar: config["enable_progress_bar"] is False}
        for kind in (Checkpoint, ProgressBar, Histograms, Evaluations, SavedRollouts):
            if off.get(kind) or any(isinstance(callback, kind) for callback in listed):
                callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
        sync = [] if any(isinstance(callback, WeightSync) for callback in listed) else [WeightSync()]
        return super()._instantiate_trainer({**config, "callbacks": [*sync, *listed]}, callbacks)

    def fit(self, model: GRPOModule, **kwargs: Any) -> None:
        """Train; what fails before the first step is reported in one line, with the rest in the log file."""
        self._run(self.trainer.fit, model, **kwargs)

    def validate(self, model: GRPOModule, **kwargs: Any) -> None:
        """Evaluate on the validation problems."""
        self._run(self.trainer.validate, model, **{**kwargs, "verbose": False})
        self._print_evaluation()

    def test(self, model: GRPOModule, **kwargs: Any) -> None:
        """Evaluate on the validation problems, under the test names."""
        self._run(self.trainer.test, model, **{**kwargs, "verbose": False})
        self._print_evaluation()

    def calibrate(self, model: GRPOModule, **kwargs: Any) -> None:
        """Measure, write what was found, and say it."""
        calibration = self._run(RunTrainer.calibrate, self.trainer, model=model, **kwargs)
        if not self.trainer.is_global_zero:
            return
        output, config = kwargs["output"], self.config[self.subcommand].as_dict()
        show(write(calibration, config["trainer"]["callbacks"], output))
        print(f"dclightning fit --config ... --config {output}/budget.yaml")
        print(f"dclightning inspect {output}")

    def doctor(self, model: GRPOModule, **kwargs: Any) -> None:
        """Examine the run; exits with 1 if something is wrong."""
        findings = self._run(RunTrainer.doctor, self.trainer, model=model, **kwargs)
        if self.trainer.is_global_zero:
            show_findings(findings)
        if any(finding.state == "wrong" for finding in findings):
            sys.exit(1)

    def _run(self, stage: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stage(*args, **kwargs)
        except (ValueError, OSError, RuntimeError, MisconfigurationException, CheckpointException) as error:
            log.debug("Failed", exc_info=True)
            begun = self.trainer.fit_loop.total_batch_idx >= 0
            reason = None if begun else _unfit_checkpoint(error)
            is_input = not begun and not isinstance(error, RuntimeError | CheckpointException)
            if reason or is_input or isinstance(error, UserError):
                raise UserError(reason or one_line(error)) from error
            raise
        except SIGTERMException:
            sys.exit(128 + signal.SIGTERM)
        except SystemExit:  # Lightning's answer to Ctrl-C
            print("dclightning: interrupted; --ckpt_path last continues from the last checkpoint", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    def _print_evaluation(self) -> None:
        """What was measured, with the ends of each interval; Lightning's own table would have a row for each end."""
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        for name, benchmark, policy, metric in measures_of(metrics) if self.trainer.is_global_zero else []:
            interval = f"({metrics[f'{name}/low']:.4g}, {metrics[f'{name}/high']:.4g})"
            print(f"{benchmark:<16} {policy:<18} {metric:<18} {metrics[name]:<8.4g} {interval}")

    def after_fit(self) -> None:
        """Say where everything is."""
        if self.trainer.is_global_zero and "train/loss" not in self.trainer.callback_metrics:
            print("Nothing was left to train; a larger --trainer.max_epochs continues the run")
        folder = self.trainer.log_dir  # which all ranks must ask for
        if self.trainer.is_global_zero and folder:
            print(f"The run is in {os.path.relpath(folder)}")


def main(arguments: list[str]) -> None:
    """Run a subcommand with its options."""
    chatter = catch_logs()
    try:
        DCLightningCLI(arguments, chatter)
    except ArgumentError as error:
        raise UserError(one_line(error).replace('"<unicode string>"', _broken_config(arguments))) from error


def _unfit_checkpoint(error: BaseException) -> str | None:
    """Why a checkpoint cannot be resumed from, if that is what an error says."""
    if isinstance(error, IsADirectoryError) and (Path(error.filename) / "meta.pt").exists():
        return (
            f"ckpt_path={str(error.filename)!r}: is in parts, one for each rank; resume it with a strategy of "
            "dclightning.ParallelStrategy, on any number of ranks"
        )
    line = one_line(error)
    if not re.search("Missing key|loading state_dict", line):
        return None
    if "sampling_policy" in line:
        return ONE_STEP_OFF
    return f"ckpt_path: the checkpoint is of another model: {line[:200]}"


class _SaveConfig(SaveConfigCallback):
    """Saves the config of a run, not where one of its parts was resumed from."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **options: Any) -> None:
        config = config.clone()
        config.ckpt_path = None
        if hasattr(config.trainer.logger, "init_args"):
            config.trainer.logger.init_args.version = None
        super().__init__(parser, config, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save when training starts, beside what the run was trained with before; an evaluation leaves no file."""
        if stage != "fit":
            return
        folder = trainer.log_dir  # which all ranks must ask for
        saved = Path(folder or "") / self.config_filename
        if trainer.is_global_zero and folder and saved.exists():
            before, now = (
                yaml.safe_load(text) for text in (saved.read_text(), self.parser.dump(self.config, skip_none=False))
            )
            changed = [key for key in ("model", "data", "trainer.callbacks") if _at(before, key) != _at(now, key)]
            if changed:
                kept = saved.with_name(f"config-{sum(1 for _ in saved.parent.glob('config*.yaml'))}.yaml")
                saved.rename(kept)
                log.warning(
                    "The run in %s is continued with another %s; its config so far is now %s",
                    os.path.relpath(saved.parent),
                    " and ".join(changed),
                    kept.name,
                )
        super().setup(trainer, pl_module, stage)


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part)
    return config


def _runs_folder(logger: Any) -> Path:
    return Path(logger.init_args.save_dir) / (logger.init_args.get("name") or "")


def _newest_checkpoint(logger: Any) -> Path:
    """The last checkpoint of the newest run that a configured logger has a folder of."""
    if not hasattr(logger, "init_args"):
        raise UserError("ckpt_path='last': needs a single logger with a save_dir; name the checkpoint's path instead")
    folder = _runs_folder(logger)
    version = logger.init_args.get("version")
    pattern = "*" if version is None else version if isinstance(version, str) else f"version_{version}"
    found = sorted(folder.glob(f"{pattern}/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"ckpt_path='last': there is no checkpoint in {folder} yet")
    return found[-1]


def catch_logs() -> MemoryHandler:
    """Keep what libraries have to say off the terminal; our own warnings stay on it."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM then logs like any other library
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chatter = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(handlers=[chatter], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", "Found .* module.* in eval mode")  # as meant: dropout would spoil the ratios
    for name in list(logging.root.manager.loggerDict):  # no library writes to the terminal by itself
        logger = logging.getLogger(name)
        if any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True
    ours = logging.StreamHandler(sys.stderr)
    ours.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    ours.setLevel(logging.WARNING)
    logging.getLogger("dclightning").addHandler(ours)
    logging.getLogger("dclightning").setLevel(logging.DEBUG)
    return chatter


def _write_log(chatter: MemoryHandler, folder: str | None) -> None:
    """Send what was caught so far, and all that comes, to the log file, if there is a folder for it."""
    logging.getLogger().removeHandler(chatter)
    if folder is None:
        logging.getLogger().addHandler(logging.NullHandler())
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    target = logging.FileHandler(Path(folder) / LOG_FILE)
    target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(target)
    chatter.setTarget(target)
    chatter.flush()


def _broken_config(arguments: list[str]) -> str:
    """Which of the config files is no YAML, for the parser does not say."""
    for path in (word.removeprefix("--config=") for word in arguments if word.endswith((".yaml", ".yml"))):
        try:
            yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError):
            return path
    return "the options"
