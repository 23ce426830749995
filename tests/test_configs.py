"""Every config that ships is parsed, and says what it claims."""

import inspect
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentError

import dclightning
from dclightning import callbacks
from dclightning.cli import DCLightningCLI
from dclightning.errors import one_line
from dclightning.models import load_policy
from tests.helpers import TINY, nearly_on_policy, random_rollout, train

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "data")


class ParseOnly(DCLightningCLI):
    """Parses as ``dclightning fit`` does, without running anything."""

    def __init__(self, *paths, options=()):
        arguments = [word for path in paths for word in ("--config", str(ROOT / "configs" / path))]
        super().__init__(["fit", *arguments, *options], MemoryHandler(1))

    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        self.trainer = self.model = self.datamodule = None

    def _run_subcommand(self, subcommand):
        pass


def parse(*paths, options=()):
    return ParseOnly(*paths, options=options).config.fit


def build(*paths, options=()):
    """The module and the callbacks that a config describes."""
    cli = ParseOnly(*paths, options=options)
    built = cli._parser("fit").instantiate_classes(cli.config.fit)
    return built.model, built.trainer.callbacks


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_it_parses(path):
    complete = "model" in (yaml.safe_load(path.read_text()).get("model") or {})
    parse(*([] if complete else [ROOT / "configs" / "paper" / "qwen3-8b.yaml"]), path)


@pytest.mark.parametrize(("name", "initial", "budget"), [("qwen3-8b", 0.1, 0.0037), ("qwen3-30b-a3b", 0.05, 0.005)])
def test_the_papers_numbers(name, initial, budget):
    config = parse(f"paper/{name}.yaml")
    (callback,) = [c for c in config.trainer.callbacks if c.class_path.endswith("LagrangianCallback")]
    multiplier = callback.init_args
    assert (multiplier.initial, multiplier.lr, multiplier.budget) == (initial, 1.0, budget)
    assert (multiplier.min_multiplier, multiplier.max_multiplier) == (0.0, 1.0)
    data, optimizer, loss = config.data, config.model.optimizer, config.model.loss.init_args
    assert (data.prompts_per_step, data.group_size, config.model.mini_batches) == (64, 8, 4)
    assert (data.sampling.max_tokens, data.sampling.temperature, data.sampling.top_p) == (8192, 1.0, 1.0)
    evaluation = data.validation_sampling
    assert (evaluation.max_tokens, evaluation.temperature, evaluation.top_p) == (32768, 0.7, 1.0)
    assert (optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
        1e-6,
        (0.9, 0.95),
        1e-15,
        0,
    )
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.24)


def test_the_papers_layouts():
    dense, mixture = parse("paper/qwen3-8b.yaml"), parse("paper/qwen3-30b-a3b.yaml")
    assert (dense.trainer.num_nodes * dense.trainer.devices, mixture.trainer.num_nodes * mixture.trainer.devices) == (
        8,
        32,
    )
    layout = mixture.trainer.strategy.init_args
    assert (layout.tensor_parallel_size, layout.expert_parallel_size) == (2, 8)
    assert mixture.data.engine.init_args.tensor_parallel_size == 4
    assert dense.model.precision == "bfloat16"
    assert mixture.model.precision == "bfloat16"


def test_fp8_is_an_overlay():
    plain, fp8 = parse("paper/qwen3-8b.yaml"), parse("paper/qwen3-8b.yaml", "paper/fp8.yaml")
    assert plain.data.engine.init_args.quantization == "none"
    assert fp8.data.engine.init_args.quantization == "fp8"
    fp8.data.engine.init_args.quantization = "none"
    assert fp8.data.engine.init_args == plain.data.engine.init_args


def test_lora_is_an_overlay():
    module, _ = build("quickstart.yaml", "scale/lora.yaml", options=["--model.lora.target_modules", "[q_proj, v_proj]"])
    assert module.lora == dclightning.LoRA(rank=16, alpha=32.0, target_modules=["q_proj", "v_proj"])


def test_the_seed_reaches_the_data():
    assert parse("quickstart.yaml", options=["--seed_everything", "7"]).data.seed == 7


METHODS = sorted(path.stem for path in (ROOT / "configs" / "methods").iterdir())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_an_overlay_that_trains(method):
    module, listed = build("quickstart.yaml", f"methods/{method}.yaml")
    rollouts = [
        nearly_on_policy(random_rollout([20, 40, 30, 64] * 2, group_size=4, seed=i, version=i)) for i in range(2)
    ]
    before = {name: p.clone() for name, p in load_policy(TINY).named_parameters()}
    module, recorder = train(rollouts, listed, module=module)
    assert any(not torch.equal(p, before[name]) for name, p in module.model.named_parameters())
    priced = {type(c).__name__ for c in listed} & {"LagrangianCallback", "FixedPenalty"}
    assert (recorder.metrics[0]["lagrangian/penalty_mean"] > 0) == bool(priced)
    assert bool(priced) == (method.startswith("dc-grpo") or method.endswith("dual-grpo"))


@pytest.mark.parametrize("name", ["PPOClip", "GSPO", "CISPO", "DPPO"])
def test_another_loss_comes_with_its_own_defaults(name):
    module, _ = build("quickstart.yaml", options=["--model.loss", name])
    assert module.loss == getattr(dclightning, name)()


def test_corrections_are_named_on_the_command_line():
    options = ["--model.corrections+=TokenTIS", "--model.corrections+=Veto", "--model.corrections.min_ratio=0.01"]
    module, _ = build("quickstart.yaml", options=options)
    assert module.corrections == [dclightning.TokenTIS(), dclightning.Veto(0.01)]


@pytest.mark.parametrize("slot", ["loss", "corrections", "penalties", "others"])
def test_classes_that_take_each_others_place_have_no_option_in_common(slot):
    # A config that puts one in the place of another would silently keep the values of such options.
    classes = {
        "loss": [dclightning.PPOClip, dclightning.GSPO, dclightning.CISPO, dclightning.DPPO],
        "corrections": [getattr(dclightning, n) for n in dir(dclightning.corrections) if n in dclightning.__all__],
        "penalties": [callbacks.LagrangianCallback, callbacks.FixedPenalty],
        "others": [callbacks.TailPenalty, callbacks.AdaptiveBudget, callbacks.FixedPenalty],
    }[slot]
    options = [name for kind in classes for name in inspect.signature(kind).parameters]
    assert len(options) == len(set(options))
    assert len(classes) > 1


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        (["--trainer.enable_checkpointing=false"], "RolloutCheckpoint"),
        (["--trainer.enable_progress_bar=false"], "RolloutProgress"),
        (["--trainer.callbacks+=RichProgressBar"], "RolloutProgress"),
    ],
)
def test_the_callbacks_of_every_run_can_be_turned_off_or_replaced(options, absent):
    def names(*options):
        cli = ParseOnly("quickstart.yaml", options=["--trainer.logger=false", *options])
        cli.config_init = cli.parser.instantiate_classes(cli.config)
        cli.save_config_callback = None
        return [type(callback).__name__ for callback in cli.instantiate_trainer().callbacks]

    assert names().count("WeightSync") == 1
    assert names()[0] == "WeightSync"  # callbacks that sample find the new weights
    assert absent in names()
    assert absent not in names(*options)
    assert names("--trainer.callbacks+=dclightning.callbacks.WeightSync").count("WeightSync") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.corrections+=TokenTIS", "--model.corrections+=SequenceTIS"], "TokenTIS and SequenceTIS both weigh"),
        (["--model.loss=DPPO", "--model.corrections+=TokenTIS"], "TokenTIS weighs by a ratio that the loss has"),
        (["--model.loss=PPO"], "model.loss='PPO': there is no such class"),
        (["--model.corrections=PPO"], "model.corrections='PPO': there is no such class"),
        (["--data.engine=nope.Engine"], "data.engine='nope.Engine': Problem with given class_path"),
        (["--model.advantage=best"], "model.advantage"),
        (["--model.corrections+=TokenTIS", "--model.corrections.cap=0"], "TokenTIS.cap=0"),
        (["--model.corrections+=TokenTIS", "--model.corrections.max=1"], "'max' is not accepted"),
        (["--model.overlong.buffer=99"], "overlong.buffer=99.0: must be a share of max_tokens"),
        (["--model.reference_kl.coefficient=-1"], "reference_kl.coefficient=-1.0"),
        (["--data.reward=dclightning.Nope"], "data.reward"),
        (["--data.extra_rewards.a=dclightning.Nope"], "data.extra_rewards"),
        (["--data.extra_rewards.MathReward=dclightning.MathReward"], "has the name 'MathReward' already"),
        (["--data.reward_weights.b=1"], "reward_weights: 'b' is not one of MathReward"),
        (["--data.reward.time_limit=0"], "time_limit=0.0: must be positive"),
    ],
)
def test_options_that_cannot_be_are_named_in_one_line(options, message):
    with pytest.raises((ArgumentError, ValueError)) as error:
        build("quickstart.yaml", options=options)
    assert message in one_line(error.value)
    assert len(one_line(error.value)) < 250
