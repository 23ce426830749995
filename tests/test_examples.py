"""The loop without the Trainer computes what the Trainer does, and stays short."""

import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric

from dclightning import AdamW, GRPOModule
from dclightning.callbacks import LagrangianCallback
from dclightning.models import named_weights
from tests.helpers import TINY, nearly_on_policy, random_rollout, train
from tests.ranks import torchrun

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "fabric_loop.py"
sys.path.append(str(SCRIPT.parent))

import fabric_loop  # noqa: E402

LENGTHS = [[40, 1, 2, 0, 35, 3, 9, 8], [1, 30, 9, 5, 0, 0, 20, 7], [4, 9, 1, 6, 2, 12, 0, 3], [9, 2, 60, 0, 1, 1, 9, 4]]
INITIAL, DUAL_LR, BUDGET = 0.3, 4.0, 0.2
SETTINGS = {"LR": 3e-4, "EPS": 1e-8, "MAX_NORM": 0.5, "MICRO_BATCH_TOKENS": 60, "DUAL_LR": DUAL_LR, "BUDGET": BUDGET}


def given_rollouts():
    """In the third nothing has a gradient: rewards are equal, and the multiplier has fallen to 0."""
    rollouts = [random_rollout(lengths, seed=i, version=i) for i, lengths in enumerate(LENGTHS)]
    torch.manual_seed(0)
    rollouts[1] = nearly_on_policy(rollouts[1])
    rollouts[2].rewards[:] = 1.0
    return rollouts


def looped(fabric, rollouts):
    """What each step of the loop gave, and the weights at the end."""
    model, optimizer = fabric_loop.set_up(fabric)
    rows, multiplier = [], INITIAL
    for rollout in rollouts:
        losses, norms, mean, following = fabric_loop.step(fabric, model, optimizer, rollout, multiplier)
        rows.append([*map(float, losses), *map(float, norms), mean, multiplier])
        multiplier = following
    return rows, {name: weight.clone() for name, weight in named_weights(model.module)}


class Rows(L.Callback):
    """What each step of the Trainer logged."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture
def settings(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setattr(fabric_loop, name, value)


def test_the_loop_equals_the_trainer(settings):
    rollouts, logged, price = given_rollouts(), Rows(), LagrangianCallback(INITIAL, DUAL_LR, BUDGET)
    optimizer = AdamW(lr=3e-4, eps=1e-8, max_grad_norm=0.5)
    module = GRPOModule(TINY, optimizer=optimizer, mini_batches=2, micro_batch_tokens=60)
    train(rollouts, [price, logged], module=module)
    assert [row["train/grad_norm"] > 0 for row in logged.rows] == [True, True, False, True]
    assert logged.rows[0]["train/clip_fraction"] > 0
    assert price.history[2] == 0 < price.history[3] < price.history[1] < 1

    rows, weights = looped(Fabric(accelerator="cpu", devices=1), rollouts)
    for (*steps, mean, multiplier), want in zip(rows, logged.rows, strict=True):
        assert sum(steps[:2]) / 2 == pytest.approx(want["train/loss"], rel=2e-6, abs=2e-6)
        assert sum(steps[2:]) / 2 == pytest.approx(want["train/grad_norm"], rel=2e-6, abs=2e-6)
        assert mean == pytest.approx(want["discrepancy/sequence_mean"], abs=2e-6)
        assert multiplier == pytest.approx(want["lagrangian/multiplier"], abs=2e-6)
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=2e-6)


CHILD = """
import sys
import torch
from lightning.fabric import Fabric
from dclightning.strategies import FabricParallelStrategy, data_parallel_group
from tests.test_examples import SETTINGS, fabric_loop, given_rollouts, looped

vars(fabric_loop).update(SETTINGS)
layouts = {"ddp": "ddp", "fsdp2": FabricParallelStrategy(), "tp": FabricParallelStrategy(tensor_parallel_size=2)}
found = {}
for name, strategy in layouts.items():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    rank, rollouts = fabric.global_rank, given_rollouts()
    if data_parallel_group(fabric.strategy)[0] == 2:  # each mini-batch of the whole is one of both ranks
        mine = [i for first in (0, 4) for i in (first + 2 * rank, first + 2 * rank + 1)]
        rollouts = [rollout.select(mine) for rollout in rollouts]
    found[name] = looped(fabric, rollouts)
torch.save(found, f"{sys.argv[1]}/{rank}.pt")
"""


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path, settings):
    (tmp_path / "child.py").write_text(CHILD)
    torchrun(2, str(tmp_path / "child.py"), str(tmp_path))
    rows, weights = looped(Fabric(accelerator="cpu", devices=1), given_rollouts())
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for layout in ("ddp", "fsdp2", "tp"):
        assert first[layout][0] == second[layout][0]  # the multiplier is the same on every rank, bit for bit
        for row, want in zip(first[layout][0], rows, strict=True):
            assert row == pytest.approx(want, rel=5e-5, abs=2e-6), layout  # AdamW makes much of little
        for name, weight in weights.items():
            assert torch.equal(first[layout][1][name], second[layout][1][name])
            torch.testing.assert_close(first[layout][1][name], weight, rtol=1e-4, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_script_trains_on_the_real_engine(tmp_path, devices):
    command = [sys.executable, str(SCRIPT), "--rollouts", "2", "--prompts", "4", "--devices", str(devices)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = [re.fullmatch(r"(\d): reward (0\.\d+), δ̄ (0\.00\d+), λ (0\.\d+)", line) for line in lines]
    assert [match and match[1] for match in found] == ["0", "1"], done.stdout
    multipliers = [float(match[4]) for match in found]
    assert multipliers[0] == 0.5 != multipliers[1]


def test_the_loop_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 120
