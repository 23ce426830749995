"""What the policies answered in each evaluation."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from dclightning.evaluation import Evaluated, to_line

_LONGEST = 2_000  # characters of a response in TensorBoard


class Evaluations(L.Callback):
    """Writes every evaluation of a training: all responses to files, and a table of some to TensorBoard.

    The files are ``evaluations/ROLLOUT/BENCHMARK-POLICY.jsonl`` in the run's folder, a line for each problem; with
    several ranks, each has files of its own.

    Args:
        samples: Problems in the table, with one response to each.
    """

    def __init__(self, samples: int = 4) -> None:
        if samples < 0:
            raise ValueError(f"samples={samples}: must not be negative")
        self.samples = samples
        self._results: dict[tuple[str, str], list[Evaluated]] = defaultdict(list)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: list[Evaluated],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep what was answered."""
        self._results[trainer.datamodule.evaluations[dataloader_idx]] += batch  # type: ignore[attr-defined]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write what there is of an evaluation that was not finished."""
        self.on_validation_end(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write it."""
        results, self._results = self._results, defaultdict(list)
        folder = trainer.log_dir  # which all ranks must ask for
        if trainer.state.fn != "fit" or folder is None or not results:
            return
        rollouts = trainer.fit_loop.total_batch_idx + 1
        of_rollout = Path(folder) / "evaluations" / f"{rollouts:06}"
        of_rollout.mkdir(parents=True, exist_ok=True)
        rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
        for (benchmark, policy), some in results.items():
            with (of_rollout / f"{benchmark}-{policy}{rank}.jsonl").open("wb") as file:
                file.writelines(map(to_line, some))
            for logger in trainer.loggers if self.samples and trainer.is_global_zero else []:
                if isinstance(logger, TensorBoardLogger):
                    table = _table(some[: self.samples])
                    logger.experiment.add_text(f"samples/{benchmark}/{policy}", table, rollouts)


def _table(results: list[Evaluated]) -> str:
    rows = ["| problem | answer | reward | response |", "|---|---|---|---|"]
    for result in results:
        response, problem = result.responses[0], result.problem
        cells = (problem.problem, problem.answer, f"{response.reward:g}", response.text[:_LONGEST])
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |")
    return "\n".join(rows)
