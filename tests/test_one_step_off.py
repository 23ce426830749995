"""Rollouts that are drawn while the update runs: each is judged by the weights that sampled it."""

import threading

import lightning as L
import pytest
import torch

from dclightning import AdamW, GRPOModule, LoRA, RolloutDataModule, Sampling, VLLMEngine
from dclightning.callbacks import LagrangianCallback, RolloutCheckpoint, StaleWeights, WeightSync
from dclightning.errors import RunStoppedError, UserError
from dclightning.models import named_weights, resolve_model
from dclightning.rollout.ahead import Ahead
from tests.helpers import TINY, kept, quiet_trainer

pytestmark = pytest.mark.slow


class Counted(VLLMEngine):
    """Says how often it was asked."""

    asked = 0

    def generate(self, *args, **options):
        self.asked += 1
        return super().generate(*args, **options)


@pytest.fixture(scope="module")
def engine():
    with kept(Counted(dtype="float32", kv_cache_gib=0.0625)) as engine:
        yield engine


class Steps(L.Callback):
    def __init__(self):
        self.rows, self.versions = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics
        self.rows.append({n: float(v) for n, v in metrics.items() if not n.startswith(("time/", "perf/")) and v == v})
        self.versions.append(batch.weight_versions.unique().tolist())


def fit(engine, folder, rollouts, one_step_off=True, ckpt_path=None, others=(), lora=None, module=None, **options):
    engine.asked, steps = 0, Steps()
    module = module or GRPOModule(
        TINY, optimizer=AdamW(lr=1e-3), mini_batches=2, gradient_checkpointing=True, lora=lora
    )
    data = RolloutDataModule(
        "dclightning/arithmetic-train",
        engine,
        prompts_per_step=4,
        sampling=Sampling(max_tokens=40),
        one_step_off=one_step_off,
        **options,
    )
    trainer = quiet_trainer(
        max_epochs=1,
        limit_train_batches=rollouts,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[
            LagrangianCallback(initial=0.5, lr=0.1, budget=0.1),
            WeightSync(),
            StaleWeights(),
            *others,
            steps,
            RolloutCheckpoint(every_n_rollouts=2, keep=5),
        ],
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return steps, {name: weight.clone() for name, weight in named_weights(module.model)}, data, module


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    steps, weights, data, _ = fit(engine, folder, 5)
    assert engine.asked == data.step == 5  # nothing is drawn for nobody
    return steps, weights, folder


def test_the_discrepancy_is_that_of_the_weights_that_sampled(engine, tmp_path, whole, caplog):
    steps, weights, _ = whole
    assert steps.versions == [[0], [0], [1], [2], [3]]
    assert [row["train/weight_lag"] for row in steps.rows] == [0, 1, 1, 1, 1]
    assert all(row["discrepancy/sequence_mean"] < 1e-5 for row in steps.rows)  # both engines compute in FP32
    # The update knows how far the policy has moved since: ratios are not 1 in the first optimizer step.
    in_step, in_step_weights, *_ = fit(engine, tmp_path, 5, one_step_off=False)
    assert in_step.versions == [[0], [1], [2], [3], [4]]
    for behind, level in zip(steps.rows[1:], in_step.rows[1:], strict=True):
        assert behind["train/approx_kl"] > level["train/approx_kl"] > 0
    assert steps.rows[0] == in_step.rows[0]
    assert not torch.equal(weights["model.norm.weight"], in_step_weights["model.norm.weight"])
    assert "Stale weights" not in caplog.text


def test_drawing_meanwhile_gives_what_drawing_before_gives(engine, tmp_path, whole, monkeypatch):
    begin = Ahead.begin
    monkeypatch.setattr(Ahead, "begin", lambda self, draw: (begin(self, draw), self.wait()))
    steps, weights, *_ = fit(engine, tmp_path, 5)
    assert steps.rows == whole[0].rows
    assert all(torch.equal(weight, weights[name]) for name, weight in whole[1].items())


def test_a_resumed_run_equals_the_whole_bit_for_bit(engine, whole):
    steps, weights, folder = whole
    checkpoint = folder / "checkpoints" / "step=4.ckpt"  # after two rollouts
    resumed, resumed_weights, *_ = fit(engine, folder, 5, ckpt_path=checkpoint)
    assert resumed.rows == steps.rows[2:]
    assert resumed.versions == steps.versions[2:]
    assert all(torch.equal(weight, resumed_weights[name]) for name, weight in weights.items())


def test_what_fails_meanwhile_stops_the_run_with_a_checkpoint(engine, tmp_path):
    def breaks(problems, completions):
        if engine.asked == 3:
            raise OSError("the server is down")
        return [float(len(c.token_ids) % 3) for c in completions]

    with pytest.raises(RunStoppedError, match="the server is down"):
        fit(engine, tmp_path, 5, reward=breaks, reward_errors="stop")
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["RolloutDataModule"] == {"step": 2}


def test_a_rollback_throws_away_what_was_drawn_with_other_weights(engine, tmp_path):
    class Back(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                with torch.no_grad():
                    pl_module.model.get_output_embeddings().weight.mul_(1.1)
                sync = next(c for c in trainer.callbacks if isinstance(c, WeightSync))
                sync.restart(trainer, pl_module)

    steps, _, data, _ = fit(engine, tmp_path, 5, others=[Back()])
    assert steps.versions == [[0], [0], [1], [3], [3]]
    assert all(row["discrepancy/sequence_mean"] < 1e-5 for row in steps.rows)
    assert data.step == 5


def test_other_runs_with_the_module_and_its_checkpoints(engine, tmp_path):
    """A second training, without and with the option, starts from the weights of now; an evaluation takes them, too."""
    *_, module = fit(engine, tmp_path / "first", 2)
    for name, one_step_off in {"off": False, "on": True}.items():
        steps, weights, *_ = fit(engine, tmp_path / name, 2, one_step_off=one_step_off, module=module)
        assert steps.versions == [[0], [0 if one_step_off else 1]]
        assert all(row["discrepancy/sequence_mean"] < 1e-5 for row in steps.rows)
    data = RolloutDataModule(
        "dclightning/arithmetic-train",
        engine,
        validation_problems={"arithmetic": "dclightning/arithmetic-test"},
        validation_sampling=Sampling(40, temperature=0.7),
        validation_limit=4,
        one_step_off=True,
    )
    trainer, fresh = quiet_trainer(callbacks=[WeightSync()]), GRPOModule(TINY)
    trainer.validate(fresh, data, ckpt_path=tmp_path / "on" / "checkpoints" / "last.ckpt")
    assert all(torch.equal(weight, weights[name]) for name, weight in named_weights(fresh.model))
    assert engine.differing_weights(weights.items()) == []


def test_the_option_cannot_be_switched_in_the_middle(engine, whole, tmp_path):
    with pytest.raises(UserError, match="one_step_off: must be what the checkpoint was saved with"):
        fit(engine, tmp_path, 5, one_step_off=False, ckpt_path=whole[2] / "checkpoints" / "last.ckpt")
    fit(engine, tmp_path, 2, one_step_off=False, lora=LoRA(rank=2))
    with pytest.raises(UserError, match="one_step_off: must be what the checkpoint was saved with"):
        fit(engine, tmp_path, 5, lora=LoRA(rank=2), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")


def test_what_is_drawn_can_be_given_up_at_any_time(engine):
    engine.start(resolve_model(TINY), 100)
    asked = [[6, 40, 41, 42, 7]] * 16, Sampling(max_tokens=60), 8
    want = engine.generate(*asked, seed=0)
    ahead, started, outcome = Ahead(), threading.Event(), []

    def draw():
        started.set()
        try:
            engine.generate(*asked, seed=1)
        except RunStoppedError as error:
            outcome.append(str(error))

    ahead.begin(draw)
    started.wait()
    ahead.cancel(engine.interrupt)
    assert outcome == ["sampling was interrupted"]
    assert ahead.take() is None
    assert [c.token_ids for c in engine.generate(*asked, seed=0)] == [c.token_ids for c in want]


def test_an_engine_that_draws_cannot_sleep(tmp_path):
    with pytest.raises(UserError, match=r"one_step_off=True: .* set its sleep to false"):
        fit(Counted(sleep=True), tmp_path, 1)
