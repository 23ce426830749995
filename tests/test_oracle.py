"""The whole update against plain autograd: one sequence at a time, the formulas written out again.

The second optimizer step of a rollout is compared as well: there the policy has moved, ratios are not 1 and clips act.
"""

import itertools

import lightning as L
import pytest
import torch

from dclightning import (
    CISPO,
    DPPO,
    GSPO,
    AdamW,
    GeometricMask,
    GRPOModule,
    Overlong,
    PPOClip,
    ReferenceKL,
    TokenMIS,
)
from dclightning.advantages import advantages
from dclightning.callbacks import FixedPenalty
from dclightning.models import load_policy
from tests.helpers import GivenRollouts, random_rollout
from tests.test_models import FAMILIES, saved

TEMPERATURE, NORM_LENGTH, KL, BONUS = 0.7, 10, 0.3, 0.2
LOSSES = {
    "ppo": PPOClip(),
    "dual": PPOClip(dual_clip=1.5),
    "gspo": GSPO(0.01, 0.02),
    "cispo": CISPO(0.9, 1.1),
    "dppo": DPPO(0.05),
}
DELTAS = {
    "probability": lambda old, q: (old.exp() - q.exp()).abs(),
    "ratio": lambda old, q: ((old - q).exp() - 1).abs(),
    "log": lambda old, q: (old - q).abs(),
}


def objective(loss, logprobs, old, q, advantage):
    """Of one response's tokens, and on which side they are cut."""
    r = (logprobs - old).exp()
    if loss == "gspo":
        r = (logprobs - old).mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    low, high = {"gspo": (0.99, 1.02), "cispo": (0.9, 1.1)}.get(loss, (0.8, 1.24))
    if loss == "cispo":
        return r.detach().clamp(low, high) * advantage * logprobs, (r > high).int() - (r < low).int()
    if loss == "dppo":
        moved = (logprobs.exp() - q.exp()).detach()
        up, down = (advantage > 0) & (moved > 0.05), (advantage < 0) & (moved < -0.05)
        return ~(up | down) * (logprobs - q).exp() * advantage, up.int() - down.int()
    clipped = torch.min(r * advantage, r.clamp(low, high) * advantage)
    up, down = (advantage > 0) & (r > high), (advantage < 0) & (r < low)
    if loss == "dual":
        clipped = torch.where(advantage < 0, torch.max(clipped, 1.5 * advantage), clipped)
        up = up | ((advantage < 0) & (r > 1.5))
    return clipped, up.int() - down.int()


class Steps(L.Callback):
    """Each optimizer step's weights and gradients, and what the rollout logged."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = list(pl_module.model.named_parameters())
        self.weights.append({name: p.detach().clone() for name, p in named})
        self.gradients.append(torch.cat([p.grad.flatten() for _, p in named]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def sequences(model, rollout):
    """Log-probs and entropies of each response."""
    for prompt, response in rollout.sequences():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        everything = logits.log_softmax(-1)
        yield everything.gather(-1, response[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def plain_model(path, weights=None):
    model = load_policy(path)
    model.set_attn_implementation("eager")
    model.load_state_dict(weights or {}, strict=False)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("oracle"), FAMILIES["qwen3"]())


AGGREGATIONS, KINDS, ADVANTAGES = ["token", "sequence", "sequence-sum-norm"], [*DELTAS], ["grpo", "rloo", "batch"]
CASES = [
    (loss, aggregation, KINDS[n % 3], ADVANTAGES[n // 2 % 3], n % 2 == 0, ["none", "mis", "geometric"][n // 3 % 3])
    for n, (loss, aggregation) in enumerate(itertools.product(LOSSES, AGGREGATIONS))
]


@pytest.mark.parametrize(("loss", "aggregation", "kind", "advantage", "mask", "correction"), CASES)
def test_both_steps_equal_plain_autograd(path, loss, aggregation, kind, advantage, mask, correction):
    correction = "geometric" if (loss, correction) == ("dppo", "mis") else correction
    corrections = {"none": [], "mis": [TokenMIS(0.005, 0.08)], "geometric": [GeometricMask(0.01, 0.06)]}[correction]
    rewards = [0.0, 1.0, 1.0, 1.0, float("nan"), 0.0, 0.3, 0.9]
    rollout = random_rollout([3, 9, 1, 6, 2, 12, 4, 4], group_size=2, temperature=TEMPERATURE, rewards=rewards)
    rollout.truncated[[1, 6]] = True
    module = GRPOModule(
        path,
        loss=LOSSES[loss],
        aggregation=aggregation,
        norm_length=NORM_LENGTH,
        advantage=advantage,
        discrepancy=kind,
        corrections=corrections,
        overlong=Overlong(mask=mask),
        reference_kl=ReferenceKL(KL, "k1"),
        entropy_bonus=BONUS,
        optimizer=AdamW(lr=3e-2, eps=1e-8, max_grad_norm=float("inf")),
        mini_batches=2,
        micro_batch_tokens=30,
    )
    steps = Steps()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FixedPenalty(0.5), steps],
    )  # fmt: skip
    trainer.fit(module, GivenRollouts([rollout]))

    with torch.no_grad():
        old, entropy = zip(*sequences(plain_model(path), rollout), strict=True)
    sampled = rollout.rollout_logprobs.split(rollout.response_lengths.tolist())
    of_responses = advantages(rollout.rewards, 2, advantage)
    valid = [i for i in range(8) if not (mask and rollout.truncated[i])]
    delta = [DELTAS[kind](old[i], sampled[i]) for i in range(8)]
    weights, keep = [], []
    for i in range(8):
        ratio = (old[i] - sampled[i]).exp()
        kept = torch.full(ratio.shape, i in valid)
        if correction == "mis":
            kept &= (ratio >= 0.005) & (ratio <= 0.08)
        if correction == "geometric":
            kept &= bool(0.01 <= (old[i] - sampled[i]).mean().exp() <= 0.06)
        keep.append(kept)
        weights.append(ratio if correction == "mis" else torch.ones_like(ratio))

    logged = {name: [] for name in ("train/clip_fraction_low", "train/clip_fraction_high", "train/approx_kl")}
    logged |= {"train/loss": [], "train/reference_kl": []}
    for step in range(2):
        model, total, responses = plain_model(path, steps.weights[step]), torch.zeros(()), 0
        tokens = sum(int(keep[i].sum()) for i in range(4 * step, 4 * step + 4))
        for i, (logprobs, spread) in enumerate(sequences(model, rollout)):
            if not 4 * step <= i < 4 * step + 4 or not keep[i].any():
                continue
            j, side = objective(loss, logprobs, old[i], sampled[i], of_responses[i] - 0.5 * delta[i])
            moved = logprobs - old[i]  # from the reference as well: training has just started
            divergence = (moved.exp() * moved).detach() * logprobs
            j = (weights[i] * j - KL * divergence + BONUS * spread)[keep[i]]
            total = total + {"token": j.sum() / tokens, "sequence": j.mean()}.get(aggregation, j.sum() / NORM_LENGTH)
            responses += 1
            logged["train/clip_fraction_low"] += (side[keep[i]] < 0).tolist()
            logged["train/clip_fraction_high"] += (side[keep[i]] > 0).tolist()
            logged["train/approx_kl"] += (moved.exp() - 1 - moved)[keep[i]].tolist()
            logged["train/reference_kl"] += (moved.exp() * moved)[keep[i]].tolist()
        (-total / (1 if aggregation == "token" else responses)).backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert (steps.gradients[step] - want).norm() / want.norm() < 1e-5

    def mean(parts, chosen=lambda i: torch.ones_like(keep[i])):
        return torch.cat([parts[i][chosen(i)] for i in valid]).double().mean().item()

    want = {name: sum(values) / len(values) for name, values in logged.items() if values}
    want["train/entropy"], want["lagrangian/penalty_mean"] = mean(entropy), 0.5 * mean(delta)
    want["lagrangian/penalty_max"] = 0.5 * max(delta[i].max().item() for i in valid)
    want["discrepancy/sequence_mean"] = sum(delta[i].mean().item() for i in valid) / len(valid)
    if corrections:
        want["discrepancy/kept_mean"] = mean(delta, lambda i: keep[i])
    for name, value in want.items():
        assert steps.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert steps.metrics["train/clip_fraction"] == pytest.approx(
        want["train/clip_fraction_low"] + want["train/clip_fraction_high"], abs=1e-6
    )
