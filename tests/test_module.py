"""What an update does, on given rollouts: the faults that users of other trainers met must not be possible here."""

import logging
import math

import pytest
import torch

from dclightning import AdamW, PolicyLoss
from dclightning.advantages import group_advantages
from dclightning.callbacks import FixedPenalty, LagrangianCallback
from dclightning.errors import UserError
from dclightning.models import load_policy
from dclightning.packing import micro_batches
from tests.helpers import TINY, random_rollout, train
from tests.test_models import FAMILIES, reference, saved


def flat(recorder):
    return torch.cat([g.flatten().double() for g in recorder.gradients.values()])


def assert_same_gradient(a, b, tolerance=1e-6):
    assert (flat(a) - flat(b)).norm() / flat(a).norm() < tolerance


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence-sum-norm"])
def test_gradient_does_not_depend_on_micro_batches(tmp_path, aggregation):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6, 2, 12, 4, 4], group_size=4)
    options = {"model": path, "loss": PolicyLoss(aggregation=aggregation)}
    _, whole = train([rollout], **options)
    for budget, most in ((1, 1), (45, 4), (60, 4)):
        lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
        assert max(map(len, micro_batches(lengths, budget))) == most
        _, cut = train([rollout], micro_batch_tokens=budget, **options)
        assert_same_gradient(whole, cut)


def test_gradient_equals_a_plain_policy_gradient(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6])
    _, recorder = train([rollout], callbacks=[FixedPenalty(0.5)], model=path)
    model = load_policy(path)
    model.set_attn_implementation("eager")
    advantages = group_advantages(rollout.rewards, 2)
    objective, offset = torch.zeros(()), 0
    for i, (prompt, response) in enumerate(rollout.sequences()):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        sampled = rollout.rollout_logprobs[offset : offset + len(response)]
        delta = (logprobs.detach().exp() - sampled.exp()).abs()
        objective = objective + (logprobs * (advantages[i] - 0.5 * delta)).sum()
        offset += len(response)
    (-objective / offset).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(recorder.gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_first_ratio_is_exactly_one_even_with_dropout(tmp_path):
    path = saved(tmp_path, FAMILIES["gpt2-dropout"]())
    for checkpointing in (False, True):
        _, recorder = train(
            [random_rollout([3, 9, 1, 6])], model=path, gradient_checkpointing=checkpointing, micro_batch_tokens=20
        )
        assert (recorder.outputs[0]["ratio"] == 1).all()
        assert recorder.metrics[0]["train/clip_fraction"] == 0


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


def test_equal_rewards_with_penalty_have_the_penaltys_gradient():
    rollout = random_rollout([3, 5, 2, 2], rewards=[1.0] * 4)
    _, one = train([rollout], callbacks=[FixedPenalty(0.1)])
    _, two = train([rollout], callbacks=[FixedPenalty(0.2)])
    assert flat(one).norm() > 0
    torch.testing.assert_close(2 * flat(one), flat(two), atol=1e-7, rtol=1e-4)


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
        old, _ = reference(module.model.name_or_path, rollout)
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


def test_only_one_callback_sets_the_penalty_and_it_does_not_outlive_the_run():
    with pytest.raises(UserError, match="LagrangianCallback is not the only one"):
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
