"""The loop without the Trainer computes what the Trainer does, and stays short."""

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric

from dclightning import AdamW, GRPOModule
from dclightning.callbacks import LagrangianCallback
from tests.helpers import TINY, nearly_on_policy, random_rollout, train

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))

import fabric_loop  # noqa: E402

# Very different lengths, and responses without a token. The multiplier jumps to 1, falls to 0, and rises again; where it
# is 0 all rewards are equal, so that nothing has a gradient.
LENGTHS = [
    [40, 1, 2, 0, 35, 3, 9, 8],
    [1, 30, 12, 5, 0, 0, 20, 7],
    [4, 9, 1, 6, 2, 12, 0, 3],
    [60, 2, 2, 50, 1, 1, 1, 40],
]
INITIAL, DUAL_LR, BUDGET = 0.3, 10.0, 0.15
SETTINGS = {"LR": 1e-3, "MAX_NORM": 0.5, "MICRO_BATCH_TOKENS": 60, "DUAL_LR": DUAL_LR, "BUDGET": BUDGET}


def given_rollouts():
    rollouts = [random_rollout(lengths, seed=i, version=i) for i, lengths in enumerate(LENGTHS)]
    rollouts[1] = nearly_on_policy(rollouts[1])
    rollouts[2].rewards[:] = 1.0
    return rollouts


def looped(fabric, rollouts, multiplier=INITIAL):
    """What each step gave, and the weights at the end."""
    model, optimizer = fabric_loop.set_up(fabric)
    rows = []
    for rollout in rollouts:
        losses, norms, mean, following = fabric_loop.step(fabric, model, optimizer, rollout, multiplier)
        rows.append({"losses": losses, "norms": norms, "discrepancy": mean, "multiplier": multiplier})
        multiplier = following
    return rows, {name: weight.detach().clone() for name, weight in model.module.named_parameters()}


class Rows(L.Callback):
    """What each step logged."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_loop_equals_the_trainer(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setattr(fabric_loop, name, value)
    rollouts, logged = given_rollouts(), Rows()
    module = GRPOModule(TINY, optimizer=AdamW(lr=1e-3, max_grad_norm=0.5), mini_batches=2, micro_batch_tokens=60)
    price = LagrangianCallback(INITIAL, DUAL_LR, BUDGET)
    train(rollouts, [price, logged], module=module)
    rows, weights = looped(Fabric(accelerator="cpu", devices=1), rollouts)

    assert price.history[:3] == [INITIAL, 1.0, 0.0]
    assert [row["train/grad_norm"] == 0 for row in logged.rows] == [False, False, True, False]
    assert logged.rows[0]["train/clip_fraction"] > 0
    for row, want in zip(rows, logged.rows, strict=True):
        assert sum(row["losses"]) / 2 == pytest.approx(want["train/loss"], abs=2e-6)
        assert sum(row["norms"]) / 2 == pytest.approx(want["train/grad_norm"], abs=2e-6)
        assert row["discrepancy"] == pytest.approx(want["discrepancy/sequence_mean"], abs=2e-6)
        assert row["multiplier"] == pytest.approx(want["lagrangian/multiplier"], abs=2e-6)
    start = dict(GRPOModule(TINY).model.named_parameters()) if False else None
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=2e-6)
