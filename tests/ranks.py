"""Trainings on several CPU processes: one start of torchrun runs any number of them, one after another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch

from dclightning import (
    GSPO,
    AdamW,
    GeometricMask,
    GRPOModule,
    LoRA,
    Overlong,
    ParallelStrategy,
    ReferenceKL,
    RolloutDataModule,
    Sampling,
    TokenTIS,
    TransformersEngine,
    Veto,
    VLLMEngine,
)
from dclightning.callbacks import AdaptiveBudget, LagrangianCallback, RolloutCheckpoint, TailPenalty, WeightSync
from dclightning.models import named_weights
from tests.helpers import TINY, GivenRollouts, quiet_trainer, random_rollout

ROOT = Path(__file__).parent.parent
EVERYTHING = {
    "loss": GSPO(0.5, 0.5),
    "aggregation": "sequence",
    "advantage": "batch-std",
    "overlong": Overlong(True, 0.5),
    "corrections": [TokenTIS(), GeometricMask(0.01, 0.06), Veto(1e-4)],
    "reference_kl": ReferenceKL(0.1),
    "entropy_bonus": 0.1,
}
METHODS = {
    "plain": {},
    "everything": EVERYTHING,
    "lora": {"lora": LoRA(rank=4), "gradient_checkpointing": True, "reference_kl": ReferenceKL(0.1)},
}
# Very different lengths in the parts that ranks get, so that they disagree about micro-batches.
# In the second rollout half of them has no response token at all.
LENGTHS = [[40, 38, 35, 30, 1, 2, 0, 3], [9, 8, 7, 6, 0, 0, 0, 0], [1, 1, 1, 1, 5, 5, 5, 5], [4] * 8]


def torchrun(ranks: int, *words: str) -> None:
    """A script, or a module after -m, on some ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def run(folder: Path, ranks: int, cases: list[dict]) -> dict[str, list[dict]]:
    """What each of the cases gave, on each rank."""
    spec = folder / f"{ranks}.json"
    spec.write_text(json.dumps(cases))
    torchrun(ranks, "-m", "tests.ranks", str(spec))
    return {case["name"]: [torch.load(folder / f"{case['name']}.{rank}.pt") for rank in range(ranks)] for case in cases}


class Shares(GivenRollouts):
    """Gives each rank that has data of its own a part of each rollout."""

    def train_dataloader(self):
        axis = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        size = 8 // axis["num_replicas"]
        mine = range(axis["rank"] * size, (axis["rank"] + 1) * size)
        self.rollouts = [rollout.select(list(mine)) for rollout in self.rollouts]
        return super().train_dataloader()


class Steps(L.Callback):
    """What each step logged, and what it was asked."""

    def __init__(self):
        self.rows, self.prompts, self.responses = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics
        logged = {n: float(v) for n, v in metrics.items() if not n.startswith(("time/", "perf/"))}
        self.rows.append({n: v for n, v in logged.items() if v == v})  # NaN says that there is no value
        self.prompts.append([prompt.tolist() for prompt, _ in batch.sequences()])
        self.responses.append([response.tolist() for _, response in batch.sequences()])


def given() -> list:
    rollouts = [random_rollout(lengths, seed=i, version=i, shared=True) for i, lengths in enumerate(LENGTHS)]
    for rollout in rollouts:
        rollout.truncated[[1, 6]] = True
    return rollouts


def by_tokens(problems, completions) -> list[float]:
    """A reward that differs in each group."""
    return [float(sum(completion.token_ids) % 3) for completion in completions]


def strategy(name: str, options: dict):
    return ParallelStrategy(**options) if name == "parallel" else name


def train(
    folder,
    name,
    model=TINY,
    kind="auto",
    layout=None,
    method="plain",
    epochs=1,
    ckpt_path=None,
    engine=None,
    problems="dclightning/arithmetic-train",
    one_step_off=False,
):
    """One training on rollouts that are given, or sampled; its results go into a file for each rank."""
    multiplier, steps = LagrangianCallback(initial=0.5, lr=0.1, budget=0.1), Steps()
    callbacks = [multiplier, *([AdaptiveBudget(warmup=1), TailPenalty(0.5)] if method == "everything" else [])]
    optimizer = AdamW(lr=1e-3, eps=1e-8, max_grad_norm=0.5)
    module = GRPOModule(model, optimizer=optimizer, mini_batches=1, micro_batch_tokens=60, **METHODS[method])
    datamodule = Shares(given())
    if engine is not None:
        datamodule = RolloutDataModule(
            problems,
            TransformersEngine() if engine == "transformers" else VLLMEngine(kv_cache_gib=0.0625, **engine),
            by_tokens,
            prompts_per_step=4,
            group_size=2,
            sampling=Sampling(max_tokens=8),
            one_step_off=one_step_off,
        )
        callbacks.append(WeightSync())
    trainer = quiet_trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy(kind, layout or {}),
        max_epochs=epochs,
        limit_train_batches=len(LENGTHS),
        callbacks=[*callbacks, steps, RolloutCheckpoint(every_n_rollouts=100)],
        default_root_dir=folder / name,
        use_distributed_sampler=False,
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    found = {
        "rows": steps.rows,
        "prompts": steps.prompts,
        "responses": steps.responses,
        "history": [*multiplier.history, multiplier.multiplier],
        "weights": {n: w.clone() for n, w in named_weights(module.model)},
    }
    torch.save(found, folder / f"{name}.{trainer.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    for case in json.loads(path.read_text()):
        train(path.parent, **case)
