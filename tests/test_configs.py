"""Every config that ships is parsed, and says what it claims."""

from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import yaml

from dclightning.cli import DCLightningCLI

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def parse():
    """Parse as ``dclightning fit`` does, without running anything."""

    class ParseOnly(DCLightningCLI):
        def before_instantiate_classes(self):
            pass

        def instantiate_classes(self):
            self.trainer = self.model = self.datamodule = None

        def _run_subcommand(self, subcommand):
            pass

    def parsed(*paths, options=()):
        arguments = [word for path in paths for word in ("--config", str(ROOT / "configs" / path))]
        return ParseOnly(["fit", *arguments, *options], MemoryHandler(1)).config.fit

    return parsed


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_it_parses(parse, path):
    base = [] if "model" in yaml.safe_load(path.read_text()) else [ROOT / "configs" / "paper" / "qwen3-8b.yaml"]
    parse(*base, path)


@pytest.mark.parametrize(("name", "initial", "budget"), [("qwen3-8b", 0.1, 0.0037), ("qwen3-30b-a3b", 0.05, 0.005)])
def test_the_papers_numbers(parse, name, initial, budget):
    config = parse(f"paper/{name}.yaml")
    (callback,) = [c for c in config.trainer.callbacks if c.class_path.endswith("LagrangianCallback")]
    multiplier = callback.init_args
    assert (multiplier.initial, multiplier.lr, multiplier.budget) == (initial, 1.0, budget)
    assert (multiplier.min_multiplier, multiplier.max_multiplier) == (0.0, 1.0)
    data, optimizer, loss = config.data, config.model.optimizer, config.model.loss
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


def test_the_papers_layouts(parse):
    dense, mixture = parse("paper/qwen3-8b.yaml"), parse("paper/qwen3-30b-a3b.yaml")
    assert (dense.trainer.num_nodes * dense.trainer.devices, mixture.trainer.num_nodes * mixture.trainer.devices) == (
        8,
        32,
    )
    layout = mixture.trainer.strategy.init_args
    assert (layout.tensor_parallel_size, layout.expert_parallel_size) == (2, 8)
    assert mixture.data.engine.init_args.tensor_parallel_size == 4
    assert dense.trainer.strategy.init_args.mixed_precision
    assert layout.mixed_precision


def test_fp8_is_an_overlay(parse):
    plain, fp8 = parse("paper/qwen3-8b.yaml"), parse("paper/qwen3-8b.yaml", "paper/fp8.yaml")
    assert plain.data.engine.init_args.quantization is None
    assert fp8.data.engine.init_args.quantization == "fp8"
    fp8.data.engine.init_args.quantization = None
    assert fp8.data.engine.init_args == plain.data.engine.init_args


def test_the_seed_reaches_the_data(parse):
    assert parse("quickstart.yaml", options=["--seed_everything", "7"]).data.seed == 7
