"""The alarm for an engine that samples with other weights than the trainer's."""

import logging

import lightning as L
import pytest
import torch

from dclightning import AdamW, GRPOModule, RolloutDataModule, Sampling, VLLMEngine
from dclightning.callbacks import LagrangianCallback, RolloutCheckpoint, StaleWeights, WeightSync
from dclightning.errors import RunStoppedError, UserError
from tests.helpers import TINY, kept, quiet_trainer


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
    with kept(Forgetful("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)) as engine:
        yield engine


def fit(engine, alarm, rollouts, sync=None, dropped=-1, lr=2e-4, others=(), folder=None):
    engine.dropped = dropped
    module = GRPOModule(TINY, optimizer=AdamW(lr=lr), mini_batches=1)
    data = RolloutDataModule(
        "dclightning/arithmetic-train", engine, prompts_per_step=4, sampling=Sampling(max_tokens=40)
    )
    trainer = quiet_trainer(
        max_epochs=1,
        limit_train_batches=rollouts,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        callbacks=[sync or WeightSync(), *others, alarm],
    )
    trainer.fit(module, data)
    return trainer


def stale(caplog):
    """The alarms, the module's own among them."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in lines if line.startswith("Stale weights")]


@pytest.mark.slow
def test_fifty_normal_rollouts_are_silent(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        trainer = fit(engine, StaleWeights(floor=0.001), rollouts=50)
    assert not stale(caplog)
    assert 0.2 < trainer.callback_metrics["guard/discrepancy_over_usual"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("compare", [True, False])
def test_a_skipped_sync_sets_it_off_at_the_next_rollout(engine, caplog, compare):
    alarm = StaleWeights(floor=0.001, compare_weights=compare)
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, alarm, rollouts=5, sync=SkippedSync(at=3))
    lines = stale(caplog)
    said = "rollout 3 was sampled with the weights of step 2, and not of step 3. Is the WeightSync callback there?"
    assert f"Stale weights: {said}" in lines
    assert any("are not the trainer's" in line for line in lines) == compare
    assert all("ollout 3" in line for line in lines)


@pytest.mark.slow
def test_a_sync_that_only_claims_to_have_happened_is_found(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, StaleWeights(floor=0.001), rollouts=5, dropped=3)
    (line,) = stale(caplog)
    assert line.startswith("Stale weights in the engine: Rollout 3: ")
    assert line.endswith("are not the trainer's, such as model.embed_tokens.weight")


@pytest.mark.slow
def test_without_looking_at_weights_the_discrepancy_tells(engine, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        fit(engine, StaleWeights(floor=0.001, compare_weights=False), rollouts=5, dropped=3, lr=1e-3)
    (line,) = stale(caplog)
    assert "Rollout 3: the mean discrepancy is" in line


@pytest.mark.slow
def test_it_can_stop_the_run_with_everything_saved(engine, tmp_path):
    multiplier, alarm = LagrangianCallback(), StaleWeights(action="stop")
    keep = RolloutCheckpoint(every_n_rollouts=10)
    with pytest.raises(RunStoppedError, match=r"Rollout 2: \d+ are not the trainer's"):
        fit(engine, alarm, rollouts=5, dropped=2, others=[multiplier, keep], folder=tmp_path)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=False)
    assert (saved["global_step"], saved["RolloutDataModule"]["step"]) == (3, 3)
    assert len(saved["callbacks"]["LagrangianCallback"]["history"]) == 3
    with pytest.raises(UserError, match="StaleWeights must come after LagrangianCallback"):
        fit(engine, LagrangianCallback(), rollouts=1, others=[alarm])


class Given(L.LightningModule):
    """Gives steps of given mean discrepancies."""

    def __init__(self, means):
        super().__init__()
        self.automatic_optimization, self.means, self.logged = False, means, []
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch, batch_idx):
        mean = self.means[batch_idx]
        return {"delta": torch.tensor([mean, mean]), "response_lengths": torch.tensor([2])}

    def log(self, name, value, **options):
        self.logged.append(value)


def run(alarm, means):
    module = Given(means)
    trainer = quiet_trainer(
        max_epochs=1,
        callbacks=[alarm],
    )
    alarm.compare_weights = False
    trainer.fit(module, torch.utils.data.DataLoader(range(len(means))))
    return module.logged


def test_usual_is_the_floor_or_what_the_discrepancy_has_risen_to_slowly(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        run(StaleWeights(floor=0.001), [0.001 * 1.05**n for n in range(60)])  # at the end 18 times the floor
        assert not stale(caplog)
        run(StaleWeights(floor=0.001), [0.001, 0.001, 0.0051])
        assert "Rollout 2: the mean discrepancy is 0.0051, usual is 0.001" in stale(caplog)[0]


def test_without_a_floor_the_first_rollouts_say_what_is_usual(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        run(StaleWeights(warmup=3), [0.01, 0.06, 0.01])
        assert not stale(caplog)
        run(StaleWeights(warmup=3), [0.01, 0.06, 0.01, 0.051])
        assert len(stale(caplog)) == 1


def test_what_lasts_becomes_usual_and_rounding_errors_are_no_discrepancy(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        run(StaleWeights(floor=0.001, window=4, warmup=1), [0.001] * 4 + [0.1] * 8)
        assert [line.split(":")[0][-2:] for line in stale(caplog)] == [" 4", " 5"]
        caplog.clear()
        run(StaleWeights(floor=1e-9), [0.0, 0.0, 1e-5, 4e-5, float("nan")])
        assert not stale(caplog)


def test_the_latest_are_resumed():
    alarm, resumed = StaleWeights(floor=0.001), StaleWeights(floor=0.001)
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
