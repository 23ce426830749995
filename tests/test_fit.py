"""The main job on the real engine: FP8 rollouts, FP32 training, small and short."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dclightning import AdamW, GRPOModule, Overlong, RolloutDataModule, Sampling, VLLMEngine
from dclightning.callbacks import (
    Evaluations,
    FixedPenalty,
    Histograms,
    LagrangianCallback,
    RolloutCheckpoint,
    WeightSync,
)
from dclightning.data.problems import Problem, load_problems
from dclightning.errors import RunStoppedError, UserError
from dclightning.report import read_scalars
from dclightning.rewards.format import one_box
from dclightning.rollout.transformers import TransformersEngine
from tests.helpers import TINY, kept

pytestmark = pytest.mark.slow
ENGINE = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)


@pytest.fixture(scope="module", autouse=True)
def engine():
    with kept(ENGINE):
        yield


class Trace(L.Callback):
    """What each rollout was and what came of it; optionally a Ctrl-C."""

    def __init__(self, interrupt_at=None, preempt_at=None):
        self.rows, self.interrupt_at, self.preempt_at = [], interrupt_at, preempt_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.interrupt_at:
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics
        multiplier = next((c.multiplier for c in trainer.callbacks if isinstance(c, LagrangianCallback)), None)
        self.rows.append(
            {
                "rollout": trainer.fit_loop.total_batch_idx,
                "tokens": batch.token_ids.tolist(),
                "rollout_logprobs": batch.rollout_logprobs.tolist(),
                "delta": outputs["delta"].tolist(),
                "loss": float(metrics["train/loss"]),
                "grad_norm": float(metrics["train/grad_norm"]),
                "lr": float(metrics["train/lr"]),
                "multiplier": multiplier,
            }
        )
        if trainer.fit_loop.total_batch_idx == self.preempt_at:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(
    folder,
    callbacks=(),
    rollouts=3,
    ckpt_path=None,
    trace=None,
    epochs=1,
    schedule="constant",
    reward=None,
    validate=False,
    module_options=None,
    problems="dclightning/arithmetic-train",
    engine=None,
    **data,
):
    trace = trace or Trace()
    module = GRPOModule(
        TINY,
        optimizer=AdamW(lr=1e-3, schedule=schedule, warmup=2),
        mini_batches=2,
        micro_batch_tokens=300,
        **(module_options or {}),
    )
    datamodule = RolloutDataModule(
        problems,
        engine or ENGINE,
        **({"reward": reward} if reward else {}),
        **{"prompts_per_step": 4, "group_size": 4, "sampling": Sampling(max_tokens=40), **data},
        validation_problems={"arithmetic": "dclightning/arithmetic-test"} if validate else None,
        validation_sampling=Sampling(max_tokens=40, temperature=0.7),
        validation_samples=2,
        validation_limit=10,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        limit_train_batches=rollouts,
        callbacks=[WeightSync(), *callbacks, trace],
        logger=TensorBoardLogger(folder, name="run", version="", default_hp_metric=False),
        enable_checkpointing=any(isinstance(c, RolloutCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=-1,
    )
    try:
        trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    except SystemExit:  # Lightning's answer to Ctrl-C and SIGTERM
        assert trace.interrupt_at is not None or trace.preempt_at is not None
    return module, trace.rows


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


@pytest.mark.parametrize("budget", [1e-4, 0.02])  # below and above what FP8 costs
def test_logged_multiplier_follows_the_logged_discrepancy(tmp_path, budget):
    lr, initial = 20.0, 0.5
    fit(tmp_path, [LagrangianCallback(initial, lr, budget), Histograms(1)], rollouts=4)
    scalars = read_scalars(tmp_path / "run")
    multipliers = [value for _, value in scalars["lagrangian/multiplier"]]
    means = [value for _, value in scalars["discrepancy/sequence_mean"]]
    assert [step for step, _ in scalars["lagrangian/multiplier"]] == [0, 1, 2, 3]
    expected = initial
    for logged, mean in zip(multipliers, means, strict=True):
        assert logged == pytest.approx(expected, abs=1e-6)
        expected = min(max(expected + lr * (mean - budget), 0.0), 1.0)
    assert (multipliers[-1] > initial) == (budget < min(means))
    assert set(DOCUMENTED) <= set(scalars)


DOCUMENTED = [
    *("train/reward", "train/response_length", "train/truncated_fraction", "train/loss", "train/grad_norm"),
    *("train/clip_fraction", "train/clip_fraction_low", "train/clip_fraction_high"),
    *("train/entropy", "train/approx_kl", "train/lr", "train/unscored_fraction", "train/discarded_per_group"),
    *("discrepancy/p50", "discrepancy/p90", "discrepancy/first_16", "discrepancy/middle", "discrepancy/last_16"),
    *("rollout_corr/raw_eff_sample_size", "lagrangian/budget"),
    *("discrepancy/sequence_mean", "discrepancy/token_mean", "discrepancy/p99", "discrepancy/max"),
    *("discrepancy/over_budget", "lagrangian/multiplier", "lagrangian/violation", "lagrangian/penalty_mean"),
    *("lagrangian/penalty_max", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"),
    *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/rollout_probs_diff_std"),
    *("time/rollout_s", "time/reward_s", "time/score_s", "time/update_s", "time/sync_s"),
    *("perf/rollout_tokens_per_s", "perf/train_tokens_per_s"),
]


def test_interrupted_anywhere_and_resumed_equals_uninterrupted(tmp_path):
    def callbacks():
        return [LagrangianCallback(0.5, 20.0, 1e-3), RolloutCheckpoint(every_n_rollouts=1, keep=1)]

    # Three epochs of three rollouts, with a learning rate that moves.
    options = {"rollouts": 3, "epochs": 3, "schedule": "cosine"}
    whole, rows = fit(tmp_path / "whole", callbacks(), **options)
    assert [row["rollout"] for row in rows] == list(range(9))
    assert len({tuple(row["tokens"]) for row in rows}) == 9
    for stop in (1, 3, 5):  # inside an epoch, at its start, at its end
        folder = tmp_path / f"stopped-{stop}"
        _, before = fit(folder, callbacks(), trace=Trace(interrupt_at=stop), **options)
        resumed, after = fit(folder, callbacks(), ckpt_path=folder / "run" / "checkpoints" / "last.ckpt", **options)
        assert before + after == rows
        assert same_weights(resumed, whole)


@pytest.mark.parametrize("stop", [0, 2])
def test_a_preempted_run_is_saved_after_its_rollout_and_resumes_exactly(tmp_path, stop):
    def callbacks():
        return [LagrangianCallback(0.5, 20.0, 1e-3), RolloutCheckpoint(every_n_rollouts=100)]

    options = {"rollouts": 4, "schedule": "cosine", "validate": True}
    whole, rows = fit(tmp_path / "whole", callbacks(), **options)
    _, before = fit(tmp_path / "cut", callbacks(), trace=Trace(preempt_at=stop), **options)
    assert len(before) == stop + 1
    last = tmp_path / "cut" / "run" / "checkpoints" / "last.ckpt"
    resumed, after = fit(tmp_path / "cut", callbacks(), ckpt_path=last, **options)
    assert before + after == rows
    assert same_weights(resumed, whole)


def test_a_run_may_be_continued_epoch_by_epoch(tmp_path):
    def callbacks():
        return [LagrangianCallback(0.5, 20.0, 1e-3), RolloutCheckpoint(every_n_rollouts=100)]

    whole, rows = fit(tmp_path / "whole", callbacks(), rollouts=2, epochs=3)
    last, parts = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt", []
    for epochs in (1, 2, 2, 3):
        ckpt_path = last if last.exists() else None
        module, some = fit(tmp_path / "parts", callbacks(), rollouts=2, epochs=epochs, ckpt_path=ckpt_path)
        assert len(some) == (2 if len(parts) < 2 * epochs else 0)  # a finished run has nothing left to do
        parts += some
    assert parts == rows
    assert same_weights(module, whole)
    assert [path.name for path in last.parent.glob("last*")] == ["last.ckpt"]


def test_epochs_may_be_shorter_than_the_problems(tmp_path):
    problems = load_problems("dclightning/arithmetic-train")[:20]  # five rollouts, in epochs of three
    callbacks = [RolloutCheckpoint(every_n_rollouts=100)]
    _, rows = fit(tmp_path, callbacks, rollouts=3, epochs=2, schedule="linear", problems=problems)
    assert [row["rollout"] for row in rows] == list(range(6))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").resolve().name == "step=12.ckpt"
    assert rows[-1]["lr"] > 0


def test_a_resumed_run_follows_its_own_schedule(tmp_path):
    callbacks = [RolloutCheckpoint(every_n_rollouts=1)]
    fit(tmp_path, callbacks, rollouts=2, schedule="linear")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    _, rows = fit(tmp_path, callbacks, rollouts=2, epochs=2, schedule="linear", ckpt_path=last)
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 5e-4])  # after a warm-up of 2, down to 0 at 4


def test_a_multiplier_that_stays_zero_is_plain_grpo_bit_for_bit(tmp_path):
    plain, rows = fit(tmp_path / "grpo")
    priced, priced_rows = fit(tmp_path / "dc", [LagrangianCallback(initial=0.0, lr=1.0, budget=1.0)])
    assert same_weights(plain, priced)
    for a, b in zip(rows, priced_rows, strict=True):
        assert {**a, "multiplier": 0.0} == b
    fixed, _ = fit(tmp_path / "dual", [FixedPenalty(1.0)])
    assert not same_weights(plain, fixed)


def test_other_seed_other_run(tmp_path):
    _, first = fit(tmp_path / "a", rollouts=1)
    _, again = fit(tmp_path / "b", rollouts=1)
    _, other = fit(tmp_path / "c", rollouts=1, seed=1)
    assert first == again
    assert first[0]["tokens"] != other[0]["tokens"]


def test_at_learning_rate_zero_the_discrepancy_stays_at_its_floor(tmp_path):
    module = GRPOModule(TINY, optimizer=AdamW(lr=0.0), mini_batches=1)
    data = RolloutDataModule(
        "dclightning/arithmetic-train",
        VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625),
        prompts_per_step=16,
        sampling=Sampling(max_tokens=40),
    )
    trace = Trace()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=6, callbacks=[WeightSync(), trace], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    means = [sum(row["delta"]) / len(row["delta"]) for row in trace.rows]
    assert min(means) > 0
    assert max(means) < 2 * min(means)


def test_the_policy_before_training_is_evaluated_and_logged(tmp_path):
    fit(tmp_path, rollouts=2, validate=True)
    scalars = read_scalars(tmp_path / "run")
    steps = [step for step, _ in scalars["val/arithmetic/deployed/avg@2"]]
    assert steps == [0, 2]
    assert all(0 <= value <= 1 for _, value in scalars["val/arithmetic/deployed/pass@2"])


def test_groups_of_equal_rewards_are_drawn_again(tmp_path, caplog):
    drawn = []

    def luck(problems, completions):
        """One problem in three has responses of different worth."""
        drawn.append([problem.id for problem in problems[::4]])
        return [float(len(problem.id) % 3 == 0 and i % 2) for i, problem in enumerate(problems)]

    class Look(L.Callback):
        batches = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batches.append(batch)

    problems = load_problems("dclightning/arithmetic-train")[:24]
    problems = [replace(problem, id="x" * (i % 3 + 1)) for i, problem in enumerate(problems)]
    callbacks = [Look(), LagrangianCallback(0.5, 20.0, 1e-3), RolloutCheckpoint(every_n_rollouts=1)]
    options = {"problems": problems, "reward": luck, "dynamic_sampling": 50, "rollouts": 4}
    with caplog.at_level("WARNING", "dclightning"):
        whole, rows = fit(tmp_path / "whole", callbacks, **options)
    assert "dynamic_sampling=50 changes the method" in caplog.text
    assert len(drawn) > 4  # some groups were drawn again
    assert len(rows) == 4
    for batch in Look.batches:
        assert (batch.rewards.view(4, 4).max(-1).values > batch.rewards.view(4, 4).min(-1).values).all()
        assert len(batch) == 16
        assert batch.token_ids.numel() == int((batch.prompt_lengths + batch.response_lengths).sum())
    discarded = sum(value for _, value in read_scalars(tmp_path / "whole" / "run")["train/discarded_per_group"])
    assert discarded == pytest.approx((sum(map(len, drawn)) - 16) / 4)

    def callbacks_again():
        return [LagrangianCallback(0.5, 20.0, 1e-3), RolloutCheckpoint(every_n_rollouts=1)]

    _, before = fit(tmp_path / "cut", callbacks_again(), trace=Trace(interrupt_at=2), **options)
    last = tmp_path / "cut" / "run" / "checkpoints" / "last.ckpt"
    resumed, after = fit(tmp_path / "cut", callbacks_again(), ckpt_path=last, **options)
    assert before + after == rows
    assert same_weights(resumed, whole)


def test_dynamic_sampling_gives_up_with_everything_saved(tmp_path):
    rolls = []

    def soon_equal(problems, completions):
        rolls.append(len(completions))
        return [float(i % 2) if len(rolls) <= 2 else 1.0 for i in range(len(completions))]

    callbacks = [RolloutCheckpoint(every_n_rollouts=100)]
    trace = Trace()
    with pytest.raises(UserError, match="dynamic_sampling=2: after so many tries 4 of 4 groups still have equal"):
        fit(tmp_path, callbacks, rollouts=4, reward=soon_equal, dynamic_sampling=2, trace=trace)
    assert len(trace.rows) == 2
    assert rolls == [16] * 5  # two that were used, the third and its two tries
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    _, rows = fit(tmp_path, callbacks, rollouts=4, ckpt_path=last)
    assert [row["rollout"] for row in rows] == [2, 3]


def test_responses_without_siblings(tmp_path):
    with pytest.raises(UserError, match="group_size=1: advantage='grpo' compares a response with its siblings"):
        fit(tmp_path, rollouts=1, group_size=1)
    _, rows = fit(tmp_path, rollouts=1, group_size=1, prompts_per_step=8, module_options={"advantage": "batch"})
    assert rows[0]["grad_norm"] > 0


def test_overlong_responses_are_masked_by_what_the_engine_says(tmp_path):
    fit(
        tmp_path,
        rollouts=1,
        sampling=Sampling(max_tokens=12),
        module_options={"overlong": Overlong(True, buffer=1 / 3)},
    )
    scalars = {name: values[0][1] for name, values in read_scalars(tmp_path / "run").items()}
    assert 0 < scalars["train/truncated_fraction"] <= 1
    assert scalars["train/length_penalty"] >= scalars["train/truncated_fraction"]


def test_a_plain_function_is_a_reward_and_may_give_other_number_types(tmp_path):
    seen = []

    def shorter(problems, completions):
        seen.extend(completions)
        kinds = [bool, int, float, torch.tensor]
        return [kinds[i % 4](len(c.token_ids) % 2) if i else None for i, c in enumerate(completions)]

    fit(tmp_path, rollouts=1, reward=shorter)
    assert len(seen) == 16
    assert all(c.text and "<|" not in c.text for c in seen if c.finish_reason == "stop")


def test_several_rewards_are_added_and_logged_by_name(tmp_path):
    async def shortness(problems, completions):
        return [-len(c.token_ids) / 100 for c in completions]

    batches = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches.append(batch)

    extra, weights = {"box": one_box, "shortness": shortness}, {"box": 0.5, "shortness": 2.0}
    fit(tmp_path, [Keep()], rollouts=2, extra_rewards=extra, reward_weights=weights, validate=True)
    scalars = read_scalars(tmp_path / "run")
    for step, batch in enumerate(batches):
        logged = {
            name: dict(enumerate(v for _, v in values))[step] for name, values in scalars.items() if "val/" not in name
        }
        parts = batch.reward_parts
        assert set(parts) == {"MathReward", "box", "shortness"}
        torch.testing.assert_close(
            batch.rewards, parts["MathReward"] + 0.5 * parts["box"] - 0.02 * batch.response_lengths
        )
        for name, part in parts.items():
            assert logged[f"reward/{name}"] == pytest.approx(part.mean().item(), rel=1e-6)
        assert logged["train/reward"] == pytest.approx(batch.rewards.mean().item(), rel=1e-6)
        assert logged["reward/timeouts"] == logged["reward/errors"] == 0
    # Accuracy is the reward's alone.
    accuracy = [value for _, value in scalars["val/arithmetic/deployed/avg@2"]]
    assert all(value * 20 == pytest.approx(round(value * 20)) for value in accuracy)


def test_async_rewards_are_given_groups_before_the_last_response_is_sampled(tmp_path):
    given, generating = [], threading.Event()

    async def early(problems, completions):
        given.append(
            (generating.is_set(), {p.id for p in problems}, len(completions), all(c.text for c in completions))
        )
        return [float(len(c.text)) for c in completions]

    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    generate = engine.generate

    def watched(*arguments):
        generating.set()
        completions = generate(*arguments)
        time.sleep(0.2)  # long enough for the thread to take what was finished
        generating.clear()
        return completions

    engine.generate = watched
    fit(tmp_path, rollouts=2, reward=early, engine=engine)
    assert len(given) == 8
    for during, problems, count, decoded in given:
        assert during
        assert (len(problems), count) == (1, 4)
        assert decoded


def test_a_reward_that_fails_stops_the_run_with_a_checkpoint(tmp_path):
    calls = []

    def breaks_later(problems, completions):
        calls.append(len(completions))
        if sum(calls) > 2 * 16:
            raise OSError("the disk is full")
        return [float(len(c.token_ids)) for c in completions]

    with pytest.raises(RunStoppedError, match="reward breaks_later: OSError: the disk is full"):
        fit(tmp_path, [RolloutCheckpoint()], rollouts=4, reward=breaks_later)
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["RolloutDataModule"] == {"step": 2}


def test_a_response_that_a_reward_fails_for_is_left_out_and_counted(tmp_path):
    def picky(problems, completions):
        return [1.0 if len(c.token_ids) % 2 else "even" for c in completions]

    fit(tmp_path, rollouts=1, reward=picky)
    scalars = {name: values[0][1] for name, values in read_scalars(tmp_path / "run").items()}
    assert 0 < scalars["reward/errors"] < 16
    assert scalars["train/unscored_fraction"] == scalars["reward/errors"] / 16
    assert scalars["train/reward"] == 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompts_per_step": 10**6}, "prompts_per_step=1000000"),
        ({"sampling": Sampling(max_tokens=1000)}, "max_tokens: the longest prompt and response make"),
    ],
)
def test_what_cannot_work_is_said_before_the_engine_starts(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        fit(tmp_path, **data)


@pytest.mark.parametrize("field", [{"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}])
def test_truncated_support_is_refused(field):
    with pytest.raises(ValueError, match="sampling"):
        RolloutDataModule("x", VLLMEngine(), sampling=Sampling(**field))


def test_both_policies_are_evaluated_on_the_weights_of_now(tmp_path):
    engine, weights = TransformersEngine(), []

    class Look(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            theirs = dict(engine._model.named_parameters())
            weights.append(all(torch.equal(p, theirs[name]) for name, p in pl_module.model.named_parameters()))

    fit(tmp_path, [Look(), Evaluations(samples=3)], rollouts=2, validate=True, training_engine=engine)
    assert weights == [True, True]  # before training and after it
    scalars = read_scalars(tmp_path / "run")
    for name in ("avg@2", "pass@2", "maj@2"):
        policies = ("deployed", "training", "deployed-training")
        deployed, training, gap = (scalars[f"val/arithmetic/{policy}/{name}"] for policy in policies)
        assert len(deployed) == 2
        for (_, a), (_, b), (_, c) in zip(deployed, training, gap, strict=True):
            assert c == pytest.approx(a - b, abs=1e-6)
        low, high = (scalars[f"val/arithmetic/deployed/{name}/{end}"][0][1] for end in ("low", "high"))
        assert 0 <= low <= deployed[0][1] <= high <= 1
    assert "val/arithmetic/deployed-training/response_length" not in scalars
    for place, rollouts in enumerate(("000000", "000002")):
        for policy in ("deployed", "training"):
            lines = (
                (tmp_path / "run" / "evaluations" / rollouts / f"arithmetic-{policy}.jsonl").read_text().splitlines()
            )
            rewards = [[response["reward"] for response in json.loads(line)["responses"]] for line in lines]
            assert len(lines) == 10
            mean = sum(map(sum, rewards)) / 20
            assert scalars[f"val/arithmetic/{policy}/avg@2"][place][1] == pytest.approx(mean, abs=1e-6)
    log = EventAccumulator(str(tmp_path / "run")).Reload()
    (table,) = {tag for tag in log.Tags()["tensors"] if tag.startswith("samples/arithmetic/deployed")}
    text = log.Tensors(table)[0].tensor_proto.string_val[0].decode()
    assert text.count("\n") == 4
    assert "What is" in text


def test_long_prompts_are_left_out_of_the_training_and_counted(tmp_path, caplog):
    short = load_problems("dclightning/arithmetic-train")[:8]
    long = [Problem(f"long-{i}", "What is 1 + 1? " * 9, "2") for i in range(3)]
    datamodule = fit(tmp_path, rollouts=2, problems=short + long, max_prompt_tokens=40)[0].trainer.datamodule
    assert datamodule.training_problems == short
    assert "max_prompt_tokens=40: 3 of 11 problems are left out" in caplog.text


def test_faults_of_the_problems_are_reported(tmp_path, caplog):
    rows = [("What is 1 + 1?", "2"), ("What is 1+1", "2"), ("What is 3 + 4?", "7"), ("What is 3 + 4?", "8")]
    rows += [(f"What is {i} + 9?", str(i + 9)) for i in range(10, 15)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"problem": q, "answer": a}) + "\n" for q, a in rows))
    fit(tmp_path, rollouts=1, problems=str(path), validate=True)
    assert f"problems={str(path)!r}: of 9, 2 conflicting answers, 1 duplicate; dclightning prepare drops" in caplog.text
