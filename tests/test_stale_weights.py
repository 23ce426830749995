"""The alarm for an engine that samples with other weights than the trainer's."""

import logging

import lightning as L
import pytest
import torch

from dclightning import AdamW, GRPOModule, RolloutDataModule, Sampling, VLLMEngine
from dclightning.callbacks import StaleWeights, WeightSync
from dclightning.errors import RunStoppedError
from tests.helpers import TINY


class Forgetful(VLLMEngine):
    """Drops the weights of one sync, and claims to have them."""

    dropped = -1

    def load_weights(self, weights, version):
        if version == self.dropped:
            self.version = version
        else:
            super().load_weights(weights, version)


class SkippedSync(WeightSync):
    """Leaves one sync out."""

    def __init__(self, at):
        self.at = at

    def push(self, trainer, pl_module):
        if trainer.fit_loop.total_batch_idx + 1 != self.at:
            super().push(trainer, pl_module)


@pytest.fixture(scope="module")
def engine():
    """One for all trainings of this file: it would be shut down at the end of each."""
    engine = Forgetful("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    close, engine.close = engine.close, lambda: None
    yield engine
    close()


def fit(engine, alarm, rollouts, sync=None, dropped=-1, lr=2e-4):
    engine.dropped = dropped
    module = GRPOModule(TINY, optimizer=AdamW(lr=lr), mini_batches=1)
    data = RolloutDataModule(
        "dclightning/arithmetic-train", engine, prompts_per_step=4, sampling=Sampling(max_tokens=40)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=rollouts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[sync or WeightSync(), alarm],
    )
    trainer.fit(module, data)
    return trainer


def alarms(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_fifty_normal_rollouts_are_silent(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        trainer = fit(engine, StaleWeights(floor=0.001), rollouts=50)
    assert not [line for line in alarms(caplog) if "tale" in line]
    assert 0.2 < trainer.callback_metrics["guard/discrepancy_over_usual"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("compare", [True, False])
def test_a_skipped_sync_sets_it_off_at_the_next_rollout(engine, caplog, compare):
    alarm = StaleWeights(floor=0.001, compare_weights=compare)
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, alarm, rollouts=5, sync=SkippedSync(at=3))
    lines = [line for line in alarms(caplog) if "Stale weights" in line]
    assert "Stale weights: rollout 3 was sampled with the weights of step 2. Is the WeightSync callback there?" in lines
    assert any("are not the trainer's" in line for line in lines) == compare
    assert all("ollout 3" in line for line in lines)


@pytest.mark.slow
def test_a_sync_that_only_claims_to_have_happened_is_found(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, StaleWeights(floor=0.001), rollouts=5, dropped=3)
    (line,) = (line for line in alarms(caplog) if "Stale weights" in line and "not the trainer's" in line)
    assert "Rollout 3: " in line


@pytest.mark.slow
def test_without_looking_at_weights_the_discrepancy_tells(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, StaleWeights(floor=0.001, compare_weights=False), rollouts=5, dropped=3, lr=1e-3)
    (line,) = (line for line in alarms(caplog) if "Stale weights" in line)
    assert "Rollout 3: the mean discrepancy is" in line


@pytest.mark.slow
def test_it_can_stop_the_run(engine):
    with pytest.raises(RunStoppedError, match=r"Rollout 2: \d+ weights of the engine are not"):
        fit(engine, StaleWeights(action="stop"), rollouts=5, dropped=2)


class Step:
    """A trainer's and a module's part in a step, for steps with given discrepancies."""

    def __init__(self):
        self.logged = []
        self.fit_loop = type("Loop", (), {"total_batch_idx": 7})

    def log(self, name, value):
        self.logged.append(value)


def run(alarm, means):

    step = Step()
    for mean in means:
        outputs = {"delta": torch.tensor([mean, mean]), "response_lengths": torch.tensor([2])}
        alarm.on_train_batch_end(step, step, outputs, None, 0)
    return step.logged


def test_usual_is_the_floor_or_what_the_discrepancy_has_risen_to_slowly(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        slowly = [0.001 * 1.05**n for n in range(60)]  # at the end 18 times the floor
        run(StaleWeights(floor=0.001), slowly)
        assert not alarms(caplog)
        run(StaleWeights(floor=0.001), [0.001, 0.001, 0.0051])
        assert "mean discrepancy is 0.0051, usual is 0.001" in alarms(caplog)[0]


def test_without_a_floor_the_first_rollouts_say_what_is_usual(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        run(StaleWeights(warmup=3), [0.01, 0.06, 0.01])
        assert not alarms(caplog)
        run(StaleWeights(warmup=3), [0.01, 0.06, 0.01, 0.051])
        assert len(alarms(caplog)) == 1


def test_what_sets_it_off_does_not_become_usual():
    alarm = StaleWeights(floor=0.001)
    run(alarm, [0.5] * 30 + [float("nan")])
    assert alarm.usual() == 0.001
    resumed = StaleWeights(floor=0.001)
    run(alarm, [0.002, 0.003])
    resumed.load_state_dict(alarm.state_dict())
    assert resumed.usual() == alarm.usual() == pytest.approx(0.0025)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 0.0}, "floor=0.0: must be positive"),
        ({"factor": 1.0}, "factor=1.0: must be above 1"),
        ({"warmup": 0}, "warmup=0"),
        ({"action": "shout"}, "action='shout': must be one of warn, stop"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StaleWeights(**options)
