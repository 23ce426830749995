"""A run that goes wrong is seen, stopped or turned back; one that goes well is left alone."""

import logging
import math

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import median_abs_deviation

from dclightning import AdamW, GRPOModule
from dclightning.callbacks import (
    AdaptiveBudget,
    CollapseGuard,
    LagrangianCallback,
    RolloutCheckpoint,
    WeightSync,
)
from dclightning.callbacks.collapse_guard import TRENDS
from dclightning.errors import RunStoppedError, UserError
from dclightning.rollout.ahead import Ahead
from dclightning.rollout.datamodule import RolloutLoader
from dclightning.trends import Trend, deviation
from tests.helpers import TINY, GivenRollouts, random_rollout, train
from tests.ranks import torchrun

values = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=1, max_size=30)
positive = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)
scales = st.sampled_from([0.25, 0.5, 2.0, 8.0])  # of the numbers that floats multiply by exactly


@given(usual=values, latest=values, least=st.floats(0.01, 10))
def test_a_deviation_is_what_numpy_says(usual, latest, least):
    spread = max(median_abs_deviation(usual) * 1.4826, least)
    want = (np.median(latest) - np.median(usual)) / spread
    assert deviation(usual, latest, least) == pytest.approx(want, rel=1e-9, abs=1e-9)


@given(usual=values, latest=values, least=st.floats(0.01, 10), scale=scales, shift=st.integers(-100, 100))
def test_units_do_not_matter(usual, latest, least, scale, shift):
    want = deviation(usual, latest, least)
    for sign in (1, -1):
        moved = ([sign * scale * value + shift for value in some] for some in (usual, latest))
        assert deviation(*moved, scale * least) == pytest.approx(sign * want, rel=1e-6, abs=1e-6)


@given(usual=positive, latest=positive, scale=st.floats(1.0, 1e3))
def test_of_ratios_neither_units_nor_direction_matter(usual, latest, scale):
    trend = Trend("x", falls="falls", rises="rises")
    want = trend.deviation(usual, latest, 0.05)
    for power in (1, -1):
        moved = ([scale * value**power for value in some] for some in (usual, latest))
        assert trend.deviation(*moved, 0.05) == pytest.approx(power * want, rel=1e-6, abs=1e-6)


@given(usual=values, latest=values, where=st.integers(0, 29), rise=st.floats(0, 100))
def test_a_larger_value_never_deviates_less(usual, latest, where, rise):
    higher = list(latest)
    higher[where % len(latest)] += rise
    assert deviation(usual, higher, 0.1) >= deviation(usual, latest, 0.1)


@given(odd=st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=2))
def test_two_odd_values_of_five_are_passed_over(odd):
    usual = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert abs(deviation(usual, [2.5, 3.0, 3.5, *odd], 0.1)) < 1
    assert abs(deviation([*usual, *odd], [3.0, 3.0, 3.0], 0.1)) < 1


def test_values_that_never_moved():
    assert deviation([1.0] * 9, [1.0]) == 0
    assert deviation([1.0] * 9, [1.1]) == math.inf
    assert deviation([1.0] * 9, [0.9]) == -math.inf
    assert TRENDS["reward"].deviation([0.5] * 9, [0.45], 0.05) == pytest.approx(-2)
    assert TRENDS["entropy"].deviation([0.5] * 9, [0.45], 0.05) == pytest.approx(math.log(0.9) / 0.05)
    assert TRENDS["discrepancy"].deviation([0.0] * 9, [1e-6], 0.05) == 0  # rounding errors of the same policy


def test_only_bad_ways_are_faults():
    assert TRENDS["reward"].fault(-9.0, 8.0) == "the reward falls"
    assert TRENDS["reward"].fault(9.0, 8.0) == TRENDS["discrepancy"].fault(-9.0, 8.0) == ""
    assert TRENDS["entropy"].fault(-9.0, 8.0) != TRENDS["entropy"].fault(9.0, 8.0)
    assert all(trend.fault(math.nan, 8.0) == trend.fault(7.9, 8.0) == "" for trend in TRENDS.values())


# By simulation, at the defaults: 50 values, the last 5, at least 20 before them, threshold 8, spread at least 5 %


def verdicts(trend, series):
    """The deviation at each rollout from the first that is judged."""
    series = [float(value) for value in series]
    return [
        trend.deviation(series[max(0, end - 55) : end - 5], series[end - 5 : end], 0.05)
        for end in range(25, len(series) + 1)
    ]


def test_noise_alone_is_no_alarm():
    """None in 10,000 verdicts on a noise of 10 %, nor on one of heavy tails; 1 in 2,000 on what drifts at random."""
    generator = np.random.default_rng(0)
    trend = TRENDS["entropy"]
    assert max(map(abs, verdicts(trend, np.exp(0.1 * generator.normal(size=10_000))))) < 6
    assert max(map(abs, verdicts(trend, np.exp(0.1 * generator.standard_t(3, size=10_000))))) < 8
    drifting = np.exp(0.1 * generator.normal(size=(10, 1_000)).cumsum(axis=1) - 3)
    alarms = [abs(value) > 8 for series in drifting for value in verdicts(trend, series)]
    assert sum(alarms) < 5e-4 * len(alarms)


@pytest.mark.parametrize("rate", [-0.3, -0.01, 0.01, 0.3])
def test_a_steady_trend_is_no_alarm_however_steep(rate):
    for name in ("entropy", "response_length"):
        assert max(map(abs, verdicts(TRENDS[name], np.exp(rate * np.arange(80)) * 10.0 ** (8 if rate < 0 else 0)))) < 2
    assert min(verdicts(TRENDS["reward"], rate * np.arange(80))) > -2


@pytest.mark.parametrize("seed", range(5))
def test_healthy_learning_is_no_alarm(seed):
    generator = np.random.default_rng(seed)
    t = np.linspace(0, 1, 300)

    def noisy(series, noise):
        return series * np.exp(noise * generator.normal(size=len(t)))

    learning = {
        "reward": (0.3 + 0.5 * t**0.5) + 0.04 * generator.normal(size=len(t)),
        "entropy": noisy(0.8 * np.exp(-3 * t), 0.05),
        "discrepancy": noisy(1e-3 * 3**t, 0.1),
        "response_length": noisy(500 * 8**t, 0.03),
    }
    for name, series in learning.items():
        assert max(map(abs, verdicts(TRENDS[name], series))) < 4, name


@pytest.mark.parametrize(
    ("name", "before", "after", "noise"),
    [
        ("reward", 0.7, 0.2, 0.04),
        ("entropy", 0.5, 0.1, 0.1),
        ("entropy", 0.5, 2.0, 0.1),
        ("discrepancy", 1e-3, 4e-3, 0.1),
        ("response_length", 500, 2000, 0.1),
        ("response_length", 500, 100, 0.1),
    ],
)
@pytest.mark.parametrize("rollouts", [1, 10])
def test_a_collapse_is_seen_soon(name, before, after, noise, rollouts):
    """At once or over ten rollouts: seen four rollouts after it is complete at the latest."""
    steps = np.concatenate([np.zeros(60), np.linspace(0, 1, rollouts + 1)[1:], np.ones(4)])
    for seed in range(5):
        generator = np.random.default_rng(seed)
        series = before + (after - before) * steps if name == "reward" else before * (after / before) ** steps
        series = series * np.exp(noise * generator.normal(size=len(series)))
        found = [trend.fault(value, 8.0) for trend in [TRENDS[name]] for value in verdicts(trend, series)]
        assert not any(found[: 60 - 24])
        assert found[-1]


# Real trainings on given rollouts


class Streamed(GivenRollouts):
    """Given rollouts that a resumed run continues, and an engine that keeps the weights it gets."""

    def __init__(self, rollouts):
        super().__init__(rollouts)
        self.ahead, self.interrupt = Ahead(), lambda: None
        self.step, self.engine = 0, self

    def train_dataloader(self):
        return RolloutLoader(self.draw, len(self.rollouts))

    def draw(self):
        while self.step < len(self.rollouts):
            self.step += 1
            yield self.rollouts[self.step - 1]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]

    def load_weights(self, weights, version):
        self.weights = {name: weight.clone() for name, weight in weights}


class Spoil(L.Callback):
    """Makes the policy know nothing, after some rollouts."""

    def __init__(self, *after):
        self.after = after

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx in self.after:
            with torch.no_grad():
                for parameter in pl_module.model.parameters():
                    parameter.mul_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


class Watch(L.Callback):
    """What was there after each rollout, and a stop after one."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.weights, self.momenta, self.lrs, self.multipliers, self.engine, self.metrics = {}, {}, {}, {}, {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        engine = trainer.datamodule
        self.engine[trainer.fit_loop.total_batch_idx - 1] = getattr(engine, "weights", None)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rollout, (optimizer,) = trainer.fit_loop.total_batch_idx, trainer.optimizers
        self.weights[rollout] = {name: p.detach().clone() for name, p in pl_module.model.named_parameters()}
        self.momenta[rollout] = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
        self.lrs[rollout] = optimizer.param_groups[0]["lr"]
        self.multipliers[rollout] = [c.multiplier for c in trainer.callbacks if isinstance(c, LagrangianCallback)]
        self.metrics[rollout] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if rollout == self.stop_after:
            raise RunStoppedError("so it was asked for")


def rollouts(count, rewards=None):
    return [random_rollout([6, 9, 4, 7], rewards=rewards and rewards(i), version=i) for i in range(count)]


def guard(action, **options):
    return CollapseGuard(action, **{"window": 12, "warmup": 5, "patience": 3, "watch": ["entropy"], **options})


def fit(folder, callbacks, count=16, stop_after=None, ckpt_path=None, save=3, keep=4):
    """A training whose checkpoints are saved after rollouts 2, 5, 8 and so on; returns what was watched."""
    torch.manual_seed(0)
    watch = Watch(stop_after)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=folder, num_sanity_val_steps=0,
        callbacks=[*callbacks, watch, RolloutCheckpoint(save, keep)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = GRPOModule(TINY, optimizer=AdamW(lr=1e-5, schedule="linear"), mini_batches=2)
    trainer.fit(module, Streamed(rollouts(count)), ckpt_path=ckpt_path)
    return watch


def said(caplog):
    return [record.getMessage() for record in caplog.records if "collapse_guard" in record.name]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_it_reads_the_step_s_own_values():
    spy, given_rewards = CollapseGuard(), [[0.0, 1.0, float(i), 1.0] for i in range(4)]
    given_rewards[2] = [math.nan] * 4  # without a value: passed over
    some = [random_rollout([3, 5, 2, 2], rewards=r, version=i) for i, r in enumerate(given_rewards)]
    _, recorder = train(some, [spy])
    state = spy.state_dict()["values"]
    assert state["reward"] == [0.5, 0.75, 1.25]
    assert state["response_length"] == [3.0] * 4
    assert state["entropy"][-1] == recorder.metrics[0]["train/entropy"]
    assert state["discrepancy"][-1] == recorder.metrics[0]["discrepancy/sequence_mean"]
    assert all(math.isnan(recorder.metrics[0][f"guard/{name}"]) for name in TRENDS)


def test_a_healthy_run_is_left_alone(caplog):
    generator = np.random.default_rng(0)
    healthy = [
        random_rollout(
            generator.integers(5, 15, 8).tolist(),
            rewards=(generator.random(8) < 0.3 + i / 150).astype(float).tolist(),
            group_size=4,
            seed=i,
            version=i,
        )
        for i in range(60)
    ]
    with caplog.at_level(logging.WARNING, "dclightning"):
        _, recorder = train(healthy, [CollapseGuard()], lr=1e-4)
    assert said(caplog) == []
    assert all(abs(recorder.metrics[0][f"guard/{name}"]) < 6 for name in TRENDS)


def test_a_warning_is_one_line_for_each_collapse(caplog):
    def rewards(i):
        return [1.0, 1.0, 0.0, 1.0] if i < 12 or i >= 18 else [0.0, 0.0, 0.0, 0.01 * i]

    with caplog.at_level(logging.WARNING, "dclightning"):
        module, _ = train(rollouts(20, rewards), [guard("warn", watch=["reward"])])
    plain, _ = train(rollouts(20, rewards))
    (line,) = said(caplog)
    assert line.startswith("Rollout 13: the reward falls: train/reward is 0.0325, usual is 0.75 (-19.1 spreads)")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_stop_ends_the_run_with_a_checkpoint_and_says_where_a_good_one_is(tmp_path):
    with pytest.raises(RunStoppedError, match=r"action='stop': rollout 14: the entropy explodes: .*step=18\.ckpt$"):
        fit(tmp_path, [Spoil(12), guard("stop")], count=15)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 30  # after rollout 14, two optimizer steps each
    assert len(saved["callbacks"]["CollapseGuard"]["values"]["entropy"]) == 15


@pytest.mark.parametrize(("sync_first", "multiplier", "raised"), [(True, 0.3, 0.5), (False, 0.0, 0.2)])
def test_rollback_puts_the_run_back_to_the_good_checkpoint(tmp_path, caplog, sync_first, multiplier, raised):
    callbacks = [LagrangianCallback(multiplier, lr=0.0, max_multiplier=0.5), guard("rollback", least_multiplier=0.2)]
    callbacks = [Spoil(12), *([WeightSync(), *callbacks] if sync_first else [*callbacks, WeightSync()])]
    with caplog.at_level(logging.WARNING, "dclightning"):
        watch = fit(tmp_path, callbacks)
    first, rolled, price = said(caplog)
    assert first.startswith("Rollout 14: the entropy")
    assert rolled.startswith("Rollback 1 of at most 3, to ")
    assert rolled.endswith("step=18.ckpt")
    assert price == f"The multiplier was {multiplier:g} there, and is now {raised:g}"
    saved = torch.load(tmp_path / "checkpoints" / "step=18.ckpt", weights_only=True)
    assert same({f"model.{name}": weight for name, weight in watch.weights[14].items()}, saved["state_dict"])
    assert same(watch.weights[14], watch.weights[8])
    assert all(torch.equal(a, b) for a, b in zip(watch.momenta[14], watch.momenta[8], strict=True))
    assert not same(watch.weights[14], watch.weights[13])
    for name, weight in watch.engine[14].items():  # what the next rollout is sampled with
        assert torch.equal(weight, watch.weights[14][name])
    assert watch.lrs[14] == pytest.approx(1e-5 * (1 - 15 / 16))  # of the rollouts done
    assert [watch.multipliers[i] for i in (13, 14, 15)] == [[multiplier], [raised], [raised]]
    # It goes on, as before the collapse.
    assert not same(watch.weights[15], watch.weights[14])
    assert watch.metrics[15]["train/entropy"] == pytest.approx(watch.metrics[11]["train/entropy"], rel=0.2)


def test_what_a_rollback_left_behind_is_not_gone_back_to(tmp_path):
    watched = guard("rollback")
    watch = fit(tmp_path, [Spoil(7, 12), watched], count=15)
    assert watched.rollbacks == 2
    assert same(watch.weights[9], watch.weights[5])
    assert watched.last_good > 2 * 9  # more has proved good since, and yet the checkpoint after rollout 8 is spoiled
    assert same(watch.weights[14], watch.weights[5])
    assert not same(watch.weights[14], watch.weights[8])


def test_it_stops_when_going_back_does_not_help_or_is_not_possible(tmp_path):
    with pytest.raises(RunStoppedError, match=r"max_rollbacks=1: rollout 14: the entropy"):
        fit(tmp_path / "again", [Spoil(9, 12), guard("rollback", max_rollbacks=1)])
    with pytest.raises(RunStoppedError, match=r"rollout 14: .*; no good checkpoint is left: keep more"):
        fit(tmp_path / "none", [Spoil(12), guard("rollback")], count=15, keep=1, save=1)
    with pytest.raises(RunStoppedError, match=r"rollout 14: .*; there is no checkpoint yet: save more often"):
        fit(tmp_path / "never", [Spoil(12), guard("rollback")], count=16, save=100)
    assert (tmp_path / "none" / "checkpoints" / "last.ckpt").exists()


def test_resumed_at_any_point_of_a_collapse_it_equals_the_whole_run(tmp_path):
    def callbacks():
        return [LagrangianCallback(0.1, lr=0.0), Spoil(9), guard("rollback")]

    whole_callbacks = callbacks()
    whole = fit(tmp_path / "whole", whole_callbacks, count=14, save=2, keep=3)
    assert whole.multipliers[11] == [0.2]
    for stop in (10, 11):  # in it, and right after the way back
        folder, resumed = tmp_path / str(stop), callbacks()
        with pytest.raises(RunStoppedError):
            fit(folder, callbacks(), count=14, stop_after=stop, save=2, keep=3)
        watch = fit(folder, resumed, count=14, ckpt_path=folder / "checkpoints" / "last.ckpt", save=2, keep=3)
        assert resumed[-1].state_dict() == whole_callbacks[-1].state_dict()
        assert watch.multipliers[13] == whole.multipliers[13]
        for rollout in range(stop + 1, 14):
            assert same(watch.weights[rollout], whole.weights[rollout])
            assert watch.lrs[rollout] == whole.lrs[rollout]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "halt"}, "action='halt': must be one of warn, stop, rollback"),
        ({"watch": ["rewards"]}, "watch='rewards'"),
        ({"warmup": 51}, "warmup=51"),
        ({"patience": 0}, "patience=0"),
        ({"threshold": 0.0}, r"threshold=0\.0"),
        ({"least_spread": -0.1}, "least_spread=-0.1"),
        ({"raise_multiplier": 0.5}, "raise_multiplier=0.5"),
        ({"least_multiplier": -1.0}, "least_multiplier=-1.0"),
        ({"max_rollbacks": -1}, "max_rollbacks=-1"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CollapseGuard(**arguments)


def test_what_cannot_work_is_refused_before_the_first_step():
    with pytest.raises(UserError, match="action='rollback': CollapseGuard goes back to checkpoints of a"):
        train(rollouts(1), [CollapseGuard("rollback")])
    multiplier, budget = LagrangianCallback(), AdaptiveBudget()
    for order in ([CollapseGuard(), multiplier, budget], [multiplier, CollapseGuard(), budget]):
        late = type(order[order.index(budget) - 1 if multiplier is order[1] else 2]).__name__
        with pytest.raises(UserError, match=f"CollapseGuard must come after {late} in the list"):
            train(rollouts(1), order)


RANKS = """
import sys
import lightning as L
import torch
from dclightning import AdamW, GRPOModule, ParallelStrategy
from dclightning.callbacks import LagrangianCallback, RolloutCheckpoint
from dclightning.models import named_weights
from tests.helpers import GivenRollouts, quiet_trainer
from tests.test_collapse_guard import guard, rollouts

strategies = {
    "ddp": "ddp", "fsdp2": ParallelStrategy(), "fsdp2-one-file": ParallelStrategy(save_distributed_checkpoint=False)
}


class Half(GivenRollouts):
    def train_dataloader(self):
        rank = self.trainer.global_rank
        self.rollouts = [rollout.select([2 * rank, 2 * rank + 1]) for rollout in self.rollouts]
        return super().train_dataloader()


class Watch(L.Callback):
    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 12:
            with torch.no_grad():
                for parameter in pl_module.model.parameters():
                    parameter.mul_(-3.0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights.append({name: weight.clone() for name, weight in named_weights(pl_module.model)})


for name, strategy in strategies.items():
    folder, watch = f"{sys.argv[1]}/{name}", Watch()
    watched, multiplier = guard("rollback"), LagrangianCallback(0.1, lr=0.0)
    trainer = quiet_trainer(
        devices=2, strategy=strategy, max_epochs=1, enable_checkpointing=True, use_distributed_sampler=False,
        callbacks=[watch, multiplier, watched, RolloutCheckpoint(3, 4)], default_root_dir=folder,
    )
    module = GRPOModule("dclightning/tiny-arithmetic", optimizer=AdamW(lr=1e-5), mini_batches=1)
    trainer.fit(module, Half(rollouts(18)))
    found = {"state": watched.state_dict(), "multiplier": multiplier.multiplier, "weights": watch.weights}
    torch.save(found, f"{folder}/rank{trainer.global_rank}.pt")
"""


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "child.py").write_text(RANKS)
    torchrun(2, str(folder / "child.py"), str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-one-file"])
def test_all_ranks_go_back_alike(on_two_ranks, strategy):
    one, other = (torch.load(on_two_ranks / strategy / f"rank{rank}.pt") for rank in range(2))
    assert one["state"] == other["state"]
    assert one["state"]["rollbacks"] == 1
    assert one["multiplier"] == other["multiplier"] == 0.2
    for ranks in (one, other):  # rollout 15 is sampled with what the checkpoint after rollout 8 has
        assert same(ranks["weights"][15], one["weights"][9])
        assert not same(ranks["weights"][15], ranks["weights"][14])
        assert same(ranks["weights"][17], one["weights"][17])
