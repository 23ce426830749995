"""What a run relies on, tried before it: the second half of ``dclightning doctor``."""

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dclightning.calibrate import compared, contexts, predict
from dclightning.discrepancy import divergences
from dclightning.doctor import GIB, Finding
from dclightning.errors import UserError, one_line
from dclightning.lora import add_adapters
from dclightning.models import TokenScores, from_pretrained, named_weights
from dclightning.rewards.math import MathReward
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.remote import RemoteEngine
from dclightning.rollout.types import Completion, Rollout
from dclightning.strategies import ParallelStrategy

BOUNDS = {"float32": 1e-3, "16 bits": 0.05, "quantised": 0.3}
"""The mean gap of sampled tokens' log-probs, in nats, that is no longer explained by the coarser precision of the two.

Healthy values are near 1e-6, 0.01 to 0.02, and 0.02 to 0.1; an engine with other weights is at 0.2 and far beyond.
"""


def examine(
    trainer: L.Trainer,
    module: Any,
    datamodule: Any,
    ckpt_path: str | None = None,
    weights_only: bool | None = None,
) -> list[Finding]:
    """Draw one rollout and try everything on it; nothing is learnt.

    Args:
        trainer: The run's, with its ``WeightSync``.
        module: The training policy.
        datamodule: The problems, the reward and the engine.
        ckpt_path: The checkpoint to take the weights from.
        weights_only: How it is loaded; see ``Trainer.predict``.
    """
    examination = _Examination()
    examination.check("memory", lambda: memory(module, datamodule, trainer))
    try:
        predict(trainer, module, datamodule, 1, examination, ckpt_path=ckpt_path, weights_only=weights_only)
    except (ValueError, OSError, RuntimeError) as error:
        if one_line(error) not in [finding.found for finding in examination.findings]:
            examination.findings.append(Finding("start", "wrong", one_line(error)))
    return examination.findings


class _Examination(L.Callback):
    """The checks that need the engine and the policy."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def check(self, name: str, found: Callable[[], Finding]) -> None:
        """Add what a check finds; one that fails finds something wrong."""
        try:
            self.findings.append(found())
        except UserError as error:
            self.findings.append(Finding(name, "wrong", one_line(error)))
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            self.findings.append(Finding(name, "wrong", f"{type(error).__name__}: {one_line(error)}"))

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: TokenScores,
        batch: Rollout,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Try everything on the rollout."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        bound = bound_of(pl_module, datamodule.engine)
        self.check("chat template", lambda: chat_template(datamodule))
        self.check("log-probs", lambda: agreement(outputs.logprobs, batch.rollout_logprobs, bound))
        self.check("weight sync", lambda: round_trip(pl_module, datamodule.engine, batch))
        self.check("reward", lambda: reward(datamodule))


def memory(module: Any, datamodule: Any, trainer: Any) -> Finding:
    """Parameters, gradients and optimizer in FP32, and the engine's weights and cache, against what there is."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(from_pretrained(AutoConfig, module.model_name))
        if module.lora is not None:
            add_adapters(model, module.lora, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shards = trainer.world_size if isinstance(trainer.strategy, ParallelStrategy) else 1
    copies = int(datamodule.one_step_off) + int(bool(module.reference_kl.coefficient) and module.lora is None)
    training = (4 * count * (1 + copies) + 12 * trained) / shards
    engine = datamodule.engine
    elsewhere = isinstance(engine, RemoteEngine)
    weights = 0 if elsewhere else count * (4 if getattr(engine, "dtype", "") == "float32" else 2)
    found = f"{count / 1e6:,.0f} million parameters: training {training / GIB:.1f} GiB, engine {weights / GIB:.1f} GiB"
    if trainer.strategy.root_device.type == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
        share = getattr(engine, "gpu_memory_utilization", 0.0) * there
        if weights > share:
            return Finding("memory", "wrong", found, f"gpu_memory_utilization: the engine gets {share / GIB:.0f} GiB")
        needed = training + share
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cache = 0.0 if elsewhere else getattr(engine, "kv_cache_gib", None)
        needed = training + weights + (1.0 if cache is None else cache) * GIB
    found += f" and its cache, of {there / GIB:.0f} GiB a device; activations come on top"
    return Finding("memory", "ok" if needed < there else "wrong", found, "" if needed < there else "more devices")


def chat_template(datamodule: Any) -> Finding:
    """Prompts begin once, and responses can end."""
    tokenizer, problem = datamodule.tokenizer, datamodule.training_problems[0]
    ids = datamodule.encode(problem)
    text = tokenizer.decode(ids)
    if tokenizer.eos_token_id is None:
        return Finding("chat template", "wrong", "the tokenizer has no end token", "set eos_token")
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        return Finding("chat template", "wrong", "prompts begin with two BOS tokens", "take one out of the template")
    if "".join(problem.problem.split()) not in "".join(text.split()):  # templates may trim
        fix = "see chat_template_options and prompt_template"
        return Finding("chat template", "wrong", f"the problem is not in the prompt {text[:80]!r}", fix)
    state: Any = "ok" if tokenizer.chat_template else "warning"
    fix = "" if tokenizer.chat_template else "the tokenizer has no chat template: problems are asked as plain text"
    return Finding("chat template", state, f"{len(ids)} tokens, ending in {text[-30:]!r}", fix)


def bound_of(module: Any, engine: Any) -> tuple[str, float]:
    """The coarser of the two declared precisions, and the gap that it explains."""
    if getattr(engine, "quantization", "none") != "none":
        name = "quantised"
    else:
        both = (module.precision, getattr(engine, "dtype", getattr(engine, "precision", "auto")))
        name = "float32" if set(both) == {"float32"} else "16 bits"
    return name, BOUNDS[name]


def agreement(logprobs: Tensor, rollout_logprobs: Tensor, bound: tuple[str, float]) -> Finding:
    """Both policies give sampled tokens the same log-probs, as far as their precisions allow."""
    gap = (logprobs - rollout_logprobs).abs()
    mean, (name, most) = float(gap.mean()), bound
    found = f"mean gap {mean:.2g} nats over {len(gap)} tokens, largest {float(gap.max()):.2g}; {name}: up to {most:g}"
    fix = "" if mean <= most else "are model, tokenizer, temperature and precision the same on both sides?"
    return Finding("log-probs", "ok" if mean <= most else "wrong", found, fix)


@torch.no_grad()
def round_trip(module: Any, engine: RolloutEngine, rollout: Rollout) -> Finding:
    """Other weights arrive in the engine, and the former ones come back, bit by bit."""
    count = len(rollout.rollout_logprobs)
    chosen = torch.arange(0, count, max(1, count // 64))
    asked, version = contexts(rollout, chosen), engine.version
    before = engine.distributions(asked, rollout.temperature)
    trained = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
    kept = [parameter.clone() for parameter in trained]
    try:
        for parameter in trained:
            if module.lora is not None:
                parameter.add_(0.01)  # half of the adapters are zeros
            elif parameter.dim() > 1:
                parameter.mul_(0.5)
        engine.load_weights(named_weights(module.model), version)
        moved = engine.distributions(asked, rollout.temperature)
        apart = float(compared(module, engine, rollout, chosen)["total_variation"].mean())
    finally:
        for parameter, weight in zip(trained, kept, strict=True):
            parameter.copy_(weight)
        engine.load_weights(named_weights(module.model), version)
    back, different = (
        engine.distributions(asked, rollout.temperature),
        engine.differing_weights(named_weights(module.model)),
    )
    way = float(divergences(moved, before)["total_variation"].mean())
    found = f"other weights move the engine by {way:.2g} (total variation), to {apart:.2g} from the trainer; and back"
    if way == 0:
        return Finding("weight sync", "wrong", "other weights change nothing in the engine")
    if not torch.equal(before, back):
        return Finding("weight sync", "wrong", "after a round trip the engine computes something else")
    if different:
        return Finding("weight sync", "wrong", f"{different[0]} is another in the engine")
    return Finding(
        "weight sync", "ok" if apart < way / 2 else "wrong", found, "" if apart < way / 2 else "they arrive changed"
    )


def reward(datamodule: Any) -> Finding:
    """A right answer is worth more than none."""
    problems = datamodule.training_problems[:32]
    texts = [f"\\boxed{{{problem.answer}}}" for problem in problems] + [""] * len(problems)
    given = [Completion(datamodule.tokenizer.encode(text), [], "stop", text=text) for text in texts]
    scores = datamodule.scorer.finish([*problems, *problems], given).total
    best, worst = scores[: len(problems)], scores[len(problems) :]
    better = int((best > worst).sum())
    found = f"the gold answer is worth more than nothing for {better} of {len(problems)} problems"
    if better == len(problems):
        return Finding("reward", "ok", found)
    if bool((scores == scores[0]).all()):
        found += "; all get the same reward, from which nothing is learnt"
    ours = any(isinstance(part, MathReward) for part in datamodule.scorer.rewards.values())
    fix = "dclightning score says why" if ours else "right, if the reward does not look for \\boxed{}"
    return Finding("reward", "wrong" if ours else "warning", found, fix)
