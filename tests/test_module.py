"""What an update does, on given rollouts: the faults that users of other trainers met must not be possible here."""

import logging
import math
from dataclasses import replace

import lightning as L
import pytest
import torch

from dclightning import (
    CISPO,
    DPPO,
    GSPO,
    AdamW,
    Correction,
    GeometricMask,
    GRPOModule,
    Overlong,
    PolicyLoss,
    PPOClip,
    ReferenceKL,
    SequenceMIS,
    TokenMIS,
    TokenTIS,
    Veto,
)
from dclightning.advantages import advantages
from dclightning.callbacks import AdaptiveBudget, FixedPenalty, LagrangianCallback, SavedRollouts, TailPenalty
from dclightning.discrepancy import sequence_mean
from dclightning.errors import UserError
from dclightning.lora import LoRA
from dclightning.models import load_policy, token_logprobs
from dclightning.packing import micro_batches, pack
from tests.helpers import TINY, random_rollout, train
from tests.test_models import FAMILIES, reference, saved


def flat(recorder):
    return torch.cat([g.flatten().double() for g in recorder.gradients.values()])


def assert_same_gradient(a, b, tolerance=1e-6):
    assert (flat(a) - flat(b)).norm() / flat(a).norm() < tolerance


METHODS = {
    "token": {},
    "sequence": {"aggregation": "sequence"},
    "sequence-sum-norm": {"aggregation": "sequence-sum-norm", "norm_length": 10},
    "gspo": {"loss": GSPO(), "aggregation": "sequence"},
    "cispo": {"loss": CISPO()},
    "dppo": {"loss": DPPO()},
    "dual-clip": {"loss": PPOClip(dual_clip=3.0)},
    "tis": {"corrections": [TokenTIS()]},
    "masks": {"corrections": [TokenMIS(0.01, 0.1), GeometricMask(0.01, 0.06), Veto(0.005)], "aggregation": "sequence"},
    "sequence-mis": {"corrections": [SequenceMIS(1e-12, 1e6)]},
    "truncated": {"overlong": Overlong(mask=True)},
    "regularised": {"entropy_bonus": 0.1, "reference_kl": ReferenceKL(0.1)},
    "batch-std": {"advantage": "batch-std"},
}


def truncated(rollout, *which):
    rollout.truncated[list(which)] = True
    return rollout


@pytest.mark.parametrize("method", METHODS)
def test_gradient_does_not_depend_on_micro_batches(tmp_path, method):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = truncated(random_rollout([3, 9, 1, 6, 2, 12, 4, 4], group_size=4), 1, 6)
    options = {"model": path, "callbacks": [FixedPenalty(0.5)], **METHODS[method]}
    _, whole = train([rollout], **options)
    assert flat(whole).norm() > 0
    kept = whole.metrics[0].get("rollout_corr/kept_fraction", 1.0)
    assert (kept < 1) == (method in ("masks", "sequence-mis"))
    for budget, most in ((1, 1), (45, 4), (60, 4)):
        lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
        assert max(map(len, micro_batches(lengths, budget))) == most
        _, cut = train([rollout], micro_batch_tokens=budget, **options)
        assert_same_gradient(whole, cut)


@pytest.mark.parametrize("method", METHODS)
def test_mini_batches_of_equal_content_have_the_whole_batchs_gradient(tmp_path, method):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    half = truncated(random_rollout([3, 9, 1, 6], group_size=2), 1)
    options = {"model": path, "callbacks": [FixedPenalty(0.5)], "lr": 0.0, **METHODS[method]}
    _, once = train([half + half], mini_batches=1, **options)
    _, twice = train([half + half], mini_batches=2, **options)
    assert_same_gradient(once, twice)


def test_a_batch_of_one_kind_of_length_may_come_in_any_order(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6, 2, 12, 4, 4], group_size=2)
    _, straight = train([rollout], model=path, callbacks=[FixedPenalty(0.5)])
    _, turned = train([rollout.select([6, 7, 2, 3, 0, 1, 4, 5])], model=path, callbacks=[FixedPenalty(0.5)])
    assert_same_gradient(straight, turned)


def plain_gradient(path, rollout, weigh):
    """Of the mean over tokens of weigh(response, p, q) * log p, where p and q are constants."""
    model = load_policy(path)
    model.set_attn_implementation("eager")
    sampled = rollout.rollout_logprobs.split(rollout.response_lengths.tolist())
    objective, count = torch.zeros(()), 0
    for i, (prompt, response) in enumerate(rollout.sequences()):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        weights = weigh(i, logprobs.detach().exp(), sampled[i].exp())
        objective, count = objective + (weights * logprobs).sum(), count + int((weights != 0).sum())
    (-objective / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradient(recorder, want):
    for name, gradient in want.items():
        torch.testing.assert_close(recorder.gradients[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
def test_gradient_equals_a_plain_policy_gradient(tmp_path, rewards):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6], rewards=rewards)
    _, recorder = train([rollout], callbacks=[FixedPenalty(0.5)], model=path)
    of_responses = advantages(rollout.rewards, 2)
    # With equal rewards nothing but the price of the discrepancy is left, and it is a constant.
    assert_gradient(recorder, plain_gradient(path, rollout, lambda i, p, q: of_responses[i] - 0.5 * (p - q).abs()))


def test_weights_and_masks_are_constants_of_the_gradient(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6])
    of_responses = advantages(rollout.rewards, 2)
    _, recorder = train([rollout], model=path, corrections=[TokenTIS(0.05)])
    assert_gradient(recorder, plain_gradient(path, rollout, lambda i, p, q: of_responses[i] * (p / q).clamp(max=0.05)))
    _, recorder = train([rollout], model=path, corrections=[TokenMIS(0.02, 0.1)])
    assert 0 < recorder.metrics[0]["rollout_corr/kept_fraction"] < 1

    def masked(i, p, q):
        return of_responses[i] * (p / q) * ((p / q >= 0.02) & (p / q <= 0.1))

    assert_gradient(recorder, plain_gradient(path, rollout, masked))


def test_first_ratio_is_exactly_one_even_with_dropout(tmp_path):
    path = saved(tmp_path, FAMILIES["gpt2-dropout"]())
    for checkpointing in (False, True):
        _, recorder = train(
            [random_rollout([3, 9, 1, 6])], model=path, gradient_checkpointing=checkpointing, micro_batch_tokens=20
        )
        assert (recorder.outputs[0]["ratio"] == 1).all()
        assert recorder.metrics[0]["train/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 1),
        ({"micro_batch_tokens": 30}, 4),
        ({"mini_batches": 2}, 4),
        ({"reference_kl": ReferenceKL(0.1)}, 1),
        ({"lora": LoRA(rank=2)}, 1),
        ({"lora": LoRA(rank=2), "reference_kl": ReferenceKL(0.1)}, 2),  # the policy without adapters is the reference
    ],
)
def test_one_micro_batch_is_passed_through_the_policy_once(monkeypatch, options, passes):
    counted = []

    def counting(model, *arguments, **kwargs):
        if model.training or any(p.requires_grad for p in model.parameters()):
            counted.append(arguments)
        return token_logprobs(model, *arguments, **kwargs)

    monkeypatch.setattr("dclightning.module.token_logprobs", counting)
    _, recorder = train([random_rollout([6, 6, 6, 6])], **options)
    assert len(counted) == passes
    assert bool((recorder.outputs[0]["ratio"] == 1).all()) == (options.get("mini_batches") is None)


def test_ranks_are_computed_for_who_asks():
    rollouts = [random_rollout([6, 0, 3, 6], version=step) for step in range(3)]
    _, recorder = train(rollouts, [SavedRollouts(every_n_rollouts=2)])
    assert [bool((step["scores"].ranks > 0).all()) for step in recorder.outputs] == [True, False, True]
    assert not recorder.outputs[1]["scores"].ranks.any()


def test_later_mini_batches_see_a_moved_policy():
    _, recorder = train([random_rollout([4] * 8)], mini_batches=4)
    ratio = recorder.outputs[0]["ratio"]
    assert (ratio[:8] == 1).all()
    assert (ratio[8:] != 1).any()


def test_equal_rewards_without_penalty_move_nothing():
    module, recorder = train([random_rollout([3, 5, 2, 2]), random_rollout([3, 5, 2, 2], rewards=[1.0] * 4, version=1)])
    alone, _ = train([random_rollout([3, 5, 2, 2])])
    assert recorder.metrics[0]["train/loss"] == 0
    assert recorder.metrics[0]["train/grad_norm"] == 0
    for a, b in zip(module.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(a, b)  # not even the optimizer's momentum


def test_multiplier_zero_is_grpo_bit_for_bit():
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(3)]
    plain, _ = train(rollouts, mini_batches=2)
    priced, recorder = train(rollouts, [LagrangianCallback(initial=0.0, budget=1e9)], mini_batches=2)
    assert recorder.metrics[0]["lagrangian/multiplier"] == 0
    for a, b in zip(plain.model.parameters(), priced.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("budget", [0.0, 0.9])
def test_multiplier_follows_its_closed_form(budget):
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(4)]
    callback = LagrangianCallback(initial=0.4, lr=0.3, budget=budget)
    module, recorder = train(rollouts, [callback], lr=0.0)
    multiplier = 0.4
    for rollout, output, used in zip(rollouts, recorder.outputs, callback.history, strict=True):
        assert used == pytest.approx(multiplier, abs=1e-6)
        old, *_ = reference(module.model.name_or_path, rollout)
        gaps = (old.exp() - rollout.rollout_logprobs.exp()).abs().split(rollout.response_lengths.tolist())
        mean = sum(gap.mean().item() for gap in gaps) / len(gaps)
        assert output["delta"].mean() > 0
        multiplier = min(max(multiplier + 0.3 * (mean - budget), 0.0), 1.0)
    assert callback.multiplier == pytest.approx(multiplier, abs=1e-5)


def test_nothing_but_empty_responses(caplog):
    rollout = random_rollout([0, 0, 0, 0])
    callback = LagrangianCallback(initial=0.3)
    with caplog.at_level(logging.WARNING, "dclightning"):
        module, recorder = train([rollout], [callback])
    assert callback.multiplier == 0.3
    assert recorder.gradients is None or all((g == 0).all() for g in recorder.gradients.values())
    assert "the optimizer step is skipped" in caplog.text
    assert "the multiplier stays at 0.3" in caplog.text
    for a, b in zip(module.model.parameters(), load_policy(TINY).parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_masked_response_leaves_the_denominator(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    both = truncated(random_rollout([3, 9], rewards=[1.0, 1.0]), 1)
    alone = replace(both.select([0]), group_size=1)
    for aggregation in ("token", "sequence", "sequence-sum-norm"):
        options = {"model": path, "callbacks": [FixedPenalty(0.5)], "aggregation": aggregation}
        _, masked = train([both], overlong=Overlong(mask=True), **options)
        _, single = train([alone], advantage="batch", **options)
        assert masked.metrics[0]["train/loss"] == pytest.approx(single.metrics[0]["train/loss"], rel=1e-6)
        assert masked.metrics[0]["discrepancy/max"] == single.metrics[0]["discrepancy/max"]
        assert_same_gradient(masked, single)


@pytest.mark.parametrize("reason", ["truncated", "corrected"])
def test_everything_masked(caplog, reason):
    options = {"corrections": [GeometricMask(1e6, 2e6)]}
    rollout = random_rollout([3, 5, 2, 2])
    if reason == "truncated":
        rollout, options = truncated(rollout, 0, 1, 2, 3), {"overlong": Overlong(mask=True)}
    callback = LagrangianCallback(initial=0.3, lr=1.0, budget=0.0)
    with caplog.at_level(logging.WARNING, "dclightning"):
        module, recorder = train([rollout], [callback], **options)
    assert "No token is left to train on: the optimizer step is skipped" in caplog.text
    assert recorder.metrics[0]["train/loss"] == recorder.metrics[0]["train/grad_norm"] == 0
    for a, b in zip(module.model.parameters(), load_policy(TINY).parameters(), strict=True):
        assert torch.equal(a, b)
    if reason == "truncated":  # nothing that counts was measured
        assert callback.multiplier == 0.3
        assert "the multiplier stays at 0.3" in caplog.text
    else:  # the discrepancy is there, whether or not its tokens are trained on
        assert callback.multiplier > 0.3


def test_a_group_of_one_needs_another_baseline():
    rollout = random_rollout([3, 5, 2, 2], group_size=1)
    with pytest.raises(ValueError, match=r"group_size=1: advantage='grpo' compares a response with its siblings"):
        train([rollout])
    _, recorder = train([rollout], advantage="batch")
    assert recorder.metrics[0]["train/grad_norm"] > 0


def test_a_long_response_pays_and_the_logged_reward_does_not_change(tmp_path):
    rollout = random_rollout([10, 40, 10, 64], rewards=[1.0, 1.0, 1.0, 1.0])
    _, recorder = train([rollout], overlong=Overlong(buffer=0.5))
    metrics = recorder.metrics[0]
    assert metrics["train/reward"] == 1
    assert metrics["train/length_penalty"] == pytest.approx((0.25 + 1) / 4)
    assert metrics["train/grad_norm"] > 0


def test_the_reference_is_the_policy_that_training_started_from():
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(2)]
    module, recorder = train(rollouts[:1], reference_kl=ReferenceKL(0.1))
    assert recorder.metrics[0]["train/reference_kl"] == 0  # not moved yet
    _, recorder = train(rollouts, reference_kl=ReferenceKL(0.1))
    assert recorder.metrics[0]["train/reference_kl"] > 0
    assert not any(name.startswith("reference") for name in module.state_dict())
    for a, b in zip(module.reference.parameters(), load_policy(TINY).parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_heavy_price_on_divergence_holds_the_policy_back():
    def divergence(coefficient):
        rollouts = [random_rollout([3, 9, 1, 6], version=i) for i in range(8)]
        module, _ = train(rollouts, reference_kl=ReferenceKL(coefficient), lr=1e-4)
        packed = pack(rollouts[0], [0, 1, 2, 3])
        with torch.no_grad():
            new, old = (token_logprobs(model, packed, 1.0)[0] for model in (module.model, module.reference))
        return (new - old).abs().mean().item()

    assert divergence(10.0) < 0.5 * divergence(1e-6)


def test_an_entropy_bonus_raises_the_entropy():
    def entropy(bonus):
        rollouts = [random_rollout([3, 9, 1, 6], rewards=[1.0] * 4, version=i) for i in range(5)]
        _, recorder = train(rollouts, entropy_bonus=bonus, lr=1e-4)
        return recorder.metrics[0]["train/entropy"]

    assert entropy(1.0) > entropy(0.0) + 0.1


def test_only_the_tail_pays(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6], rewards=[1.0] * 4)
    _, recorder = train([rollout], [FixedPenalty(0.5), TailPenalty(0.75)], model=path)
    delta = recorder.outputs[0]["delta"]
    bound = delta.sort().values[-5]  # 4 of 19 tokens are above the smallest number that 3/4 do not exceed
    assert (delta > bound).sum() == 4
    want = delta.where(delta > bound, 0.0).mean() * 0.5
    assert recorder.metrics[0]["lagrangian/penalty_mean"] == pytest.approx(want.item(), rel=1e-5)
    cut = truncated(random_rollout([3, 9, 1, 6], rewards=[1.0] * 4), 1)  # its tokens are no part of the tail
    _, recorder = train([cut], [FixedPenalty(0.5), TailPenalty(0.75)], model=path, overlong=Overlong(mask=True))
    delta = recorder.outputs[0]["delta"]
    assert len(delta) == 10
    want = delta.sort().values[-2:].sum() / 10 * 0.5
    assert recorder.metrics[0]["lagrangian/penalty_mean"] == pytest.approx(want.item(), rel=1e-5)
    with pytest.raises(UserError, match="TailPenalty needs LagrangianCallback or FixedPenalty before it"):
        train([rollout], [TailPenalty(), FixedPenalty(0.5)], model=path)


def test_the_budget_follows_what_was_measured():
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(6)]
    budget = AdaptiveBudget(floor_quantile=0.5, slack=0.1, window=3, warmup=2)
    multiplier = LagrangianCallback(initial=0.5, lr=1.0, budget=0.9)
    used = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            used.append((multiplier.budget, sequence_mean(outputs["delta"], outputs["response_lengths"]).item()))

    train(rollouts, [multiplier, budget, Watch()], lr=0.0)
    expected, means = 0.5, [mean for _, mean in used]
    for step, (c, mean) in enumerate(used):
        latest = sorted(means[max(0, step - 3) : step])
        want = 0.9
        if step >= 2:  # the first budget that was measured is the highest
            want = 1.1 * min(latest[1] if len(latest) == 3 else sum(latest) / 2, sum(means[:2]) / 2)
        assert c == pytest.approx(want)
        assert multiplier.history[step] == pytest.approx(expected)
        expected = min(max(expected + mean - c, 0.0), 1.0)
    again = AdaptiveBudget()
    again.load_state_dict({"measured": [0.9], "ceiling": 1.0})
    again.load_state_dict(budget.state_dict())
    assert again.state_dict() == budget.state_dict()
    with pytest.raises(UserError, match="AdaptiveBudget needs a LagrangianCallback"):
        train(rollouts[:1], [AdaptiveBudget()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corrections": [TokenTIS(), SequenceMIS()]}, "TokenTIS and SequenceMIS both weigh"),
        ({"corrections": [Veto(), TokenTIS()], "loss": DPPO()}, "TokenTIS weighs by a ratio that the loss has"),
        ({"entropy_bonus": -1.0}, "entropy_bonus=-1.0"),
        ({"norm_length": 0}, "norm_length=0"),
        ({"loss": "GSPO"}, "loss='GSPO': must be a PolicyLoss"),
        ({"corrections": "TokenTIS"}, "corrections='T': must be a Correction"),
        ({"overlong": {"mask": True}}, "overlong={'mask': True}: must be a Overlong"),
        ({"aggregation": "tokens"}, "aggregation='tokens': must be one of token, sequence"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        GRPOModule(TINY, **options)


def test_an_empty_response_beside_others_changes_nothing():
    _, recorder = train([random_rollout([0, 3, 9, 4], rewards=[0.0, 1.0, 0.0, 1.0])])
    assert all(math.isfinite(value) for value in recorder.metrics[0].values())
    assert len(recorder.outputs[0]["delta"]) == 16


def test_an_unscored_response_has_no_advantage():
    def gradient(first):  # of a token mean, to which the first response adds nothing
        rollout = random_rollout([4, 4, 4, 4], group_size=4, rewards=[math.nan, 1.0, 0.0, 1.0])
        rollout.token_ids[5:9] = torch.tensor(first)
        _, recorder = train([rollout])
        assert recorder.metrics[0]["train/reward"] == pytest.approx(2 / 3)
        assert recorder.metrics[0]["train/unscored_fraction"] == pytest.approx(1 / 4)
        return flat(recorder)

    one, other = gradient([20, 21, 22, 23]), gradient([50, 51, 52, 53])
    assert one.norm() > 0
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_stale_weights_raise_an_alarm(caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        train([random_rollout([3, 5], version=0), random_rollout([3, 5], version=0)])
    assert "Stale weights: rollout 1 was sampled with the weights of step 0" in caplog.text
    assert caplog.text.count("Stale weights") == 1


def test_gradient_is_clipped_to_the_norm():
    rollout = random_rollout([3, 9, 1, 6])
    _, free = train([rollout])
    norm = free.metrics[0]["train/grad_norm"]
    assert norm == pytest.approx(flat(free).norm().item(), rel=1e-5)
    _, bound = train([rollout], max_grad_norm=norm / 2)
    torch.testing.assert_close(flat(bound), flat(free) / 2, rtol=1e-3, atol=1e-7)


def test_the_logged_learning_rate_is_the_one_used():
    module, recorder = train([random_rollout([3, 5])], schedule="linear")
    assert recorder.metrics[0]["train/lr"] == pytest.approx(1e-3)
    assert module.lr_schedulers().get_last_lr() == [0.0]


def test_what_has_no_value_in_a_step_is_not_logged_again():
    rollouts = [random_rollout([3, 5, 2, 2]), random_rollout([3, 5, 2, 2], rewards=[math.nan] * 4, version=1)]
    _, recorder = train(rollouts)
    assert math.isnan(recorder.metrics[0]["train/reward"])
    assert math.isnan(recorder.metrics[0]["train/approx_kl"])
    assert recorder.metrics[0]["train/unscored_fraction"] == 1


def test_a_loss_of_ones_own_is_checked():
    class Mean(PolicyLoss):
        def objective(self, logprobs, old_logprobs, rollout_logprobs, advantages, lengths):
            return (logprobs * advantages).mean(), torch.zeros_like(logprobs)

    class Cut(Correction):
        def __call__(self, log_ratio, lengths):
            return torch.ones_like(lengths), torch.ones_like(lengths, dtype=torch.bool)

    with pytest.raises(ValueError, match=r"Mean.objective: must return two tensors with a number for each token"):
        train([random_rollout([3, 5])], loss=Mean())
    with pytest.raises(ValueError, match="Cut: must return two tensors with a number for each token"):
        train([random_rollout([3, 5])], corrections=[Cut()])


def test_only_one_callback_sets_the_penalty_and_it_does_not_outlive_the_run():
    with pytest.raises(UserError, match="FixedPenalty and LagrangianCallback both set the penalty"):
        train([random_rollout([3, 5])], [FixedPenalty(0.5), LagrangianCallback()])
    module, _ = train([random_rollout([3, 5])], [FixedPenalty(0.5)])
    _, recorder = train([random_rollout([3, 5])], module=module)
    assert recorder.metrics[0]["lagrangian/penalty_mean"] == 0


@pytest.mark.parametrize("field", ["lr", "max_grad_norm", "warmup"])
def test_bad_optimizer_settings_are_named(field):
    with pytest.raises(ValueError, match=f"{field}=-1"):
        AdamW(**{field: -1})
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        AdamW(max_grad_norm=0)


def test_a_schedule_needs_an_end():
    with pytest.raises(ValueError, match="schedule='cosine': needs an end"):
        train([random_rollout([3, 5])], schedule="cosine", epochs=-1)


def test_mini_batches_must_divide_the_prompts():
    with pytest.raises(ValueError, match="mini_batches=3: must divide"):
        train([random_rollout([3] * 8)], mini_batches=3)
