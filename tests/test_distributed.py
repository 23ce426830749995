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
from dclightning import (
    GSPO, AdamW, GeometricMask, GRPOModule, Overlong, ParallelStrategy, ReferenceKL, TokenTIS, Veto
)
from dclightning.callbacks import AdaptiveBudget, LagrangianCallback, RolloutCheckpoint, TailPenalty
from tests.helpers import GivenRollouts, Recorder, random_rollout
from dclightning.models import named_weights

model, method, strategy, devices, out, epochs, ckpt_path = sys.argv[1:]
devices, ckpt_path = int(devices), ckpt_path or None
strategy = ParallelStrategy() if strategy == "fsdp2" else strategy
torch.set_num_threads(1)


class Shares(GivenRollouts):
    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        size = 8 // ranks
        self.rollouts = [rollout.select(list(range(rank * size, rank * size + size))) for rollout in self.rollouts]
        return super().train_dataloader()


class Steps(L.Callback):
    rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics
        logged = {n: float(v) for n, v in metrics.items() if not n.startswith(("time/", "perf/"))}
        self.rows.append({n: v for n, v in logged.items() if v == v})  # NaN says that there is no value


# Very different lengths on the two ranks, so that they disagree about micro-batches.
# In the second rollout one of them has no response token at all.
lengths = [[40, 38, 35, 30, 1, 2, 0, 3], [9, 8, 7, 6, 0, 0, 0, 0], [1, 1, 1, 1, 5, 5, 5, 5], [4] * 8]
rollouts = [random_rollout(lengths[i], seed=i, version=i) for i in range(4)]
for rollout in rollouts:
    rollout.truncated[[1, 6]] = True
multiplier = LagrangianCallback(initial=0.5, lr=0.1, budget=0.1)
callbacks, options = [multiplier], {}
if method == "everything":
    callbacks += [AdaptiveBudget(warmup=1), TailPenalty(0.5)]
    options = {
        "loss": GSPO(0.5, 0.5), "aggregation": "sequence", "advantage": "batch-std", "overlong": Overlong(True, 0.5),
        "corrections": [TokenTIS(), GeometricMask(0.01, 0.06), Veto(1e-4)],
        "reference_kl": ReferenceKL(0.1), "entropy_bonus": 0.1,
    }
module = GRPOModule(
    model, optimizer=AdamW(lr=1e-3, eps=1e-8, max_grad_norm=0.5), mini_batches=1, micro_batch_tokens=60, **options
)
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy=strategy, max_epochs=int(epochs), logger=False,
    callbacks=[*callbacks, Steps(), RolloutCheckpoint(every_n_rollouts=100)], default_root_dir=f"{out}.run",
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
trainer.fit(module, Shares(rollouts), ckpt_path=ckpt_path)
weights = dict(named_weights(module.model))
torch.save({"rows": Steps.rows, "history": multiplier.history + [multiplier.multiplier],
            "weights": {n: w.clone() for n, w in weights.items()}}, f"{out}.{trainer.global_rank}")
"""


def run(tmp_path, model, strategy, devices, epochs=1, ckpt_path="", method="plain"):
    out = tmp_path / f"{strategy}{devices}-{epochs}.pt"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    tmp_path.mkdir(exist_ok=True)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), model, method, strategy, str(devices), str(out), str(epochs), str(ckpt_path)],
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
    folder = tmp_path_factory.mktemp("alone")
    return {method: run(folder, model, "auto", 1, method=method)[0] for method in ("plain", "everything")}


@pytest.mark.parametrize(
    ("method", "strategy", "devices"),
    [
        ("plain", "ddp", 2),
        ("plain", "fsdp2", 2),
        ("plain", "fsdp2", 1),
        ("everything", "ddp", 2),
        ("everything", "fsdp2", 2),
    ],
)
def test_ranks_and_shards_change_nothing(tmp_path, model, alone, method, strategy, devices):
    ranks, one = run(tmp_path, model, strategy, devices, method=method), alone[method]
    if method == "everything":
        assert any(0 < row["rollout_corr/kept_fraction"] < 1 for row in one["rows"])
    for rank in ranks:
        assert [row.keys() for row in rank["rows"]] == [row.keys() for row in one["rows"]]
        assert rank["rows"] == ranks[0]["rows"]
        for row, want in zip(rank["rows"], one["rows"], strict=True):
            assert row == pytest.approx(want, rel=1e-5, abs=2e-6)
        assert rank["history"] == ranks[0]["history"]  # the multiplier is the same on every rank, bit for bit
        assert rank["history"] == pytest.approx(one["history"], abs=1e-7)
        for name, weight in one["weights"].items():
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


STOPPING = """
import sys
import lightning as L
from dclightning import GRPOModule, RolloutDataModule, Sampling, TransformersEngine
from dclightning.callbacks import RolloutCheckpoint, WeightSync
from dclightning.errors import RunStoppedError

where, folder, limit = sys.argv[1:]


def breaks(problems, completions):
    breaks.calls += 1
    if trainer.global_rank == 1 and where == "training" and breaks.calls >= 2:
        raise OSError("the server is down")
    return [float(len(c.token_ids) % 3) for c in completions]


def validates(problems, completions):
    rollouts = trainer.fit_loop.total_batch_idx + 1
    if trainer.global_rank == 1 and (where, rollouts) in (("validation", 1), ("evaluation before training", 0)):
        raise OSError("the server is down")
    return [1.0] * len(completions)


breaks.calls = 0
sampling = Sampling(max_tokens=8)
data = RolloutDataModule(
    "dclightning/arithmetic-train", TransformersEngine(), breaks, prompts_per_step=4, group_size=2, sampling=sampling,
    reward_errors="stop", validation_problems={"arithmetic": "dclightning/arithmetic-test"},
    validation_reward=validates, validation_sampling=sampling, validation_limit=int(limit),
)
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_train_batches=3, logger=False,
    callbacks=[WeightSync(), RolloutCheckpoint(100)], default_root_dir=folder, num_sanity_val_steps=-1,
    val_check_interval=1,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
try:
    trainer.fit(GRPOModule("dclightning/tiny-arithmetic", mini_batches=1), data)
except RunStoppedError as error:
    print(f"rank {trainer.global_rank}: {error}", flush=True)
"""


@pytest.mark.parametrize("where", ["training", "validation", "evaluation before training"])
def test_all_ranks_stop_where_a_reward_fails_on_one(tmp_path, where):
    out = run_two_ranks(tmp_path, where, limit=3)
    assert "rank 0: another rank has stopped the run" in out
    assert "rank 1: reward " in out
    assert "OSError: the server is down" in out
    if where != "evaluation before training":
        saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
        assert saved["RolloutDataModule"] == {"step": 1}


def test_a_rank_without_problems_waits_for_the_others(tmp_path):
    assert run_two_ranks(tmp_path, "nowhere", limit=1) == ""
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["RolloutDataModule"] == {"step": 3}


def run_two_ranks(tmp_path, where, limit):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "child.py"
    script.write_text(STOPPING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), where, str(tmp_path), str(limit)],
        env=environment, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


MEASURE = """
import sys
import lightning as L
import torch
from torch.distributed.tensor import DTensor
from dclightning import GRPOModule, ParallelStrategy, RolloutDataModule, Sampling, TransformersEngine
from dclightning.calibrate import calibrate, write
from dclightning.callbacks import WeightSync
from dclightning.examination import examine
from dclightning.inspection import find
from pathlib import Path

tensor_parallel_size, out = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
module = GRPOModule("dclightning/tiny-arithmetic", mini_batches=1)
data = RolloutDataModule(
    "dclightning/arithmetic-train", TransformersEngine(), prompts_per_step=4, sampling=Sampling(max_tokens=20)
)
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=ParallelStrategy(tensor_parallel_size=tensor_parallel_size), logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[WeightSync()],
    use_distributed_sampler=False,
)
calibration = calibrate(trainer, module, data, rollouts=1, positions=16, output=out)
sharded = all(isinstance(p, DTensor) for p in module.model.parameters())
findings = examine(trainer, module, data)
if trainer.is_global_zero:
    write(calibration, [], out)
    assert find(out) == out / "responses.jsonl"
torch.save({"report": calibration.report(), "sharded": sharded, "findings": [(f.check, f.state) for f in findings]},
           out / f"{trainer.global_rank}.pt")
"""


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_calibrate_and_doctor_on_two_ranks(tmp_path, tensor_parallel_size):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (tmp_path / "measure.py").write_text(MEASURE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "measure.py"), str(tensor_parallel_size), str(tmp_path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["report"] == second["report"]
    assert first["report"]["responses"] == 32
    assert first["report"]["divergences"]["kl"]["max"] < 1e-6  # both policies compute in FP32
    assert first["report"]["divergences"]["top1_agreement"]["mean"] == 1
    assert first["sharded"] or tensor_parallel_size > 1  # which leaves norms whole
    assert {state for _, state in first["findings"] + second["findings"]} == {"ok"}
