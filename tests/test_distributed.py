"""Two CPU processes give what one gives: plain data parallelism, and sharded parameters."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

CHILD = """
import sys
import lightning as L
import torch
from dclightning import AdamW, GRPOModule, ParallelStrategy
from dclightning.callbacks import LagrangianCallback, RolloutCheckpoint
from tests.helpers import GivenRollouts, Recorder, random_rollout
from dclightning.models import named_weights

model, strategy, devices, out, epochs, ckpt_path = sys.argv[1:]
devices, ckpt_path = int(devices), ckpt_path or None
strategy = ParallelStrategy() if strategy == "fsdp2" else strategy
torch.set_num_threads(1)


class Shares(GivenRollouts):
    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        size = 8 // ranks
        self.rollouts = [share(rollout, list(range(rank * size, rank * size + size))) for rollout in self.rollouts]
        return super().train_dataloader()


def share(rollout, chosen):
    keep = torch.tensor(chosen)
    pieces = rollout.sequences()
    logprobs = rollout.rollout_logprobs.split(rollout.response_lengths.tolist())
    return type(rollout)(
        token_ids=torch.cat([torch.cat(pieces[i]) for i in chosen]),
        prompt_lengths=rollout.prompt_lengths[keep],
        response_lengths=rollout.response_lengths[keep],
        rollout_logprobs=torch.cat([logprobs[i] for i in chosen]),
        rewards=rollout.rewards[keep],
        truncated=rollout.truncated[keep],
        group_size=rollout.group_size,
        temperature=rollout.temperature,
        weight_version=rollout.weight_version,
    )


class Steps(L.Callback):
    rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        m = trainer.callback_metrics
        names = ["train/loss", "train/grad_norm", "discrepancy/sequence_mean", "discrepancy/p99", "train/reward"]
        self.rows.append([float(m[name]) for name in names])


# Very different lengths on the two ranks, so that they disagree about micro-batches.
# In the second rollout one of them has no response token at all.
lengths = [[40, 38, 35, 30, 1, 2, 0, 3], [9, 8, 7, 6, 0, 0, 0, 0], [1, 1, 1, 1, 5, 5, 5, 5], [4] * 8]
rollouts = [random_rollout(lengths[i], seed=i, version=i) for i in range(4)]
multiplier = LagrangianCallback(initial=0.5, lr=0.1, budget=0.1)
module = GRPOModule(model, optimizer=AdamW(lr=1e-3, eps=1e-8, max_grad_norm=0.5), mini_batches=1, micro_batch_tokens=60)
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy=strategy, max_epochs=int(epochs), logger=False,
    callbacks=[multiplier, Steps(), RolloutCheckpoint(every_n_rollouts=100)], default_root_dir=f"{out}.run",
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
trainer.fit(module, Shares(rollouts), ckpt_path=ckpt_path)
weights = dict(named_weights(module.model))
torch.save({"rows": Steps.rows, "history": multiplier.history + [multiplier.multiplier],
            "weights": {n: w.clone() for n, w in weights.items()}}, f"{out}.{trainer.global_rank}")
"""


def run(tmp_path, model, strategy, devices, epochs=1, ckpt_path=""):
    out = tmp_path / f"{strategy}{devices}-{epochs}.pt"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    tmp_path.mkdir(exist_ok=True)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), model, strategy, str(devices), str(out), str(epochs), str(ckpt_path)],
        env=environment, cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    return [torch.load(f"{out}.{rank}") for rank in range(devices)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.test_models import FAMILIES, saved

    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("model"), FAMILIES["qwen3"]())


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model):
    return run(tmp_path_factory.mktemp("alone"), model, "auto", 1)[0]


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 1)])
def test_ranks_and_shards_change_nothing(tmp_path, model, alone, strategy, devices):
    ranks = run(tmp_path, model, strategy, devices)
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["rows"]), torch.tensor(alone["rows"]), rtol=1e-5, atol=2e-6)
        assert rank["history"] == ranks[0]["history"]  # the multiplier is the same on every rank, bit for bit
        assert rank["history"] == pytest.approx(alone["history"], abs=1e-7)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp2", 1), ("fsdp2", 2)])
def test_a_resumed_run_equals_the_whole(tmp_path, model, strategy, devices):
    whole = run(tmp_path / "whole", model, strategy, devices, epochs=2)
    run(tmp_path / "stopped", model, strategy, devices, epochs=1)
    last = tmp_path / "stopped" / f"{strategy}{devices}-1.pt.run" / "checkpoints" / "last.ckpt"
    resumed = run(tmp_path / "stopped", model, strategy, devices, epochs=2, ckpt_path=last)
    for rank, (a, b) in enumerate(zip(whole, resumed, strict=True)):
        assert a["rows"][4:] == b["rows"], rank
        assert a["history"] == b["history"]
        assert all(torch.equal(weight, b["weights"][name]) for name, weight in a["weights"].items())
