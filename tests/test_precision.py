"""The training policy in 16 bits: parameters stay FP32, and FP16 gradients neither vanish nor stop the run."""

import pytest
import torch

from dclightning import GRPOModule
from dclightning.errors import UserError
from dclightning.loss_scale import LossScale
from dclightning.models import load_policy, token_logprobs
from dclightning.packing import pack
from tests.helpers import TINY, GivenRollouts, nearly_on_policy, quiet_trainer, random_rollout, train
from tests.test_models import FAMILIES, saved

LENGTHS = [9, 12, 3, 7]


@pytest.fixture(scope="module")
def rollout():
    return nearly_on_policy(random_rollout(LENGTHS))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_log_probs_are_those_of_a_model_in_16_bits_and_parameters_stay_fp32(rollout, precision):
    packed = pack(rollout, [0, 1, 2, 3])
    policies = [load_policy(TINY, precision=p) for p in ("float32", precision)]
    with torch.no_grad():
        exact, coarse = (token_logprobs(policy, packed, 1.0).logprobs for policy in policies)
    assert coarse.dtype == torch.float32
    gap = (exact - coarse).abs()
    assert 1e-5 < gap.mean() < {"bfloat16": 0.1, "float16": 0.01}[precision]
    assert {parameter.dtype for parameter in policies[1].parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_experts_compute_in_16_bits_too(tmp_path, monkeypatch, precision):
    policy = load_policy(saved(tmp_path, FAMILIES["qwen3-moe"]()), precision=precision)
    linear, dtypes = torch.nn.functional.linear, []

    def spy(*arguments):
        dtypes.append(linear(*arguments).dtype)
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    token_logprobs(policy, pack(random_rollout(LENGTHS), [0, 1, 2, 3]), 1.0)
    layers, seen = policy.config.num_hidden_layers, policy.config.num_experts
    assert len(dtypes) > layers * (5 + seen)  # attention, router and, if all are chosen, two for each expert
    assert set(dtypes) == {getattr(torch, precision)}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_gradients_are_nearly_those_of_fp32_and_the_first_ratio_is_one(rollout, precision):
    modules = [GRPOModule(TINY, precision=p, mini_batches=1) for p in ("float32", precision)]
    if precision == "float16":
        modules[1].loss_scale.value = 2.0**10
    runs = [train([rollout], module=module)[1] for module in modules]
    exact, coarse = (torch.cat([g.flatten() for g in run.gradients.values()]) for run in runs)
    assert coarse.dtype == torch.float32
    assert torch.cosine_similarity(exact, coarse, dim=0) > 0.99
    assert coarse.norm() == pytest.approx(float(exact.norm()), rel=0.05)
    assert runs[1].metrics[0]["train/grad_norm"] == pytest.approx(runs[0].metrics[0]["train/grad_norm"], rel=0.05)
    assert torch.equal(runs[1].outputs[0]["ratio"], torch.ones(sum(LENGTHS)))


def test_an_fp16_gradient_that_overflows_skips_the_step_and_halves_the_scale(rollout, caplog):
    module = GRPOModule(TINY, precision="float16", mini_batches=1)
    module.loss_scale.value = 2.0**40
    trained, recorder = train([rollout], module=module)
    before = dict(load_policy(TINY).named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in trained.model.named_parameters())
    assert trained.loss_scale.value == 2.0**39
    assert recorder.metrics[0]["train/loss_scale"] == 2.0**40
    assert "the optimizer step is skipped" in caplog.text


def test_the_loss_scale_doubles_after_so_many_good_steps_and_never_falls_below_one():
    scale = LossScale(value=2.0, patience=3)
    for finite, want in [(False, 1), (False, 1), (True, 1), (True, 1), (True, 2), (True, 2), (False, 1)]:
        scale.update(finite)
        assert scale.value == want


def test_the_loss_scale_is_resumed(tmp_path, rollout):
    def trainer(epochs):
        return quiet_trainer(
            max_epochs=epochs,
        )

    module = GRPOModule(TINY, precision="float16", mini_batches=1)
    module.loss_scale.value = 2.0**12
    first = trainer(1)
    first.fit(module, GivenRollouts([rollout]))
    first.save_checkpoint(tmp_path / "a.ckpt")
    resumed = GRPOModule(TINY, precision="float16", mini_batches=1)
    trainer(2).fit(resumed, GivenRollouts([rollout]), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert (resumed.loss_scale.value, resumed.loss_scale.good_steps) == (2.0**12, 2)


def test_lightnings_own_precision_is_refused():
    with pytest.raises(ValueError, match="precision='float8': must be one of float32"):
        GRPOModule(TINY, precision="float8")
    trainer = quiet_trainer(precision="bf16-mixed", max_epochs=1)
    with pytest.raises(UserError, match="must be 32-true"):
        trainer.fit(GRPOModule(TINY), GivenRollouts([random_rollout([2, 3])]))
