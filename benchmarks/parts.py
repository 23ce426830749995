"""Parts of a training step beside the least that they could take, in turns in one process.

python parts.py PART MODEL ROUNDS prints what each round took.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CONFIGURE_LOGGING="0", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import lightning as L
import torch
from given import GivenRollouts
from models import TINY
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from turns import cpu_seconds, cpu_seconds_of

from dclightning import AdamW, GRPOModule, MathReward, Rollout, Sampling, VLLMEngine
from dclightning.attention import PACKED, lanes
from dclightning.callbacks import LagrangianCallback
from dclightning.data.problems import Problem, load_problems
from dclightning.models import (
    add_logprobs,
    load_policy,
    load_tokenizer,
    named_weights,
    resolve_model,
    token_logprobs,
)
from dclightning.packing import Pack
from dclightning.rewards.scoring import Scorer
from dclightning.rollout.responses import encode_prompt, respond
from dclightning.rollout.types import Completion

Rounds = dict[str, list[float]]


def turns(rounds: int, clock: Callable[[], float] = cpu_seconds, **works: Callable[[], float]) -> Rounds:
    """Seconds of each work a unit, of which it returns how many it did; the first round warms up and is left out."""
    taken: Rounds = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            start = clock()
            done = work()
            taken[name].append((clock() - start) / done)
    return {name: seconds[1:] for name, seconds in taken.items()}


def engine_of(model: str, tokens: int) -> VLLMEngine:
    """A running engine in FP32."""
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.25)
    engine.start(model, tokens + 64)
    return engine


def rollout(model: str, rounds: int) -> Rounds:
    """Rollouts with log-probs, decoding and all that follows, and vLLM's own generate without log-probs. A token."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    tokens = 32 if model == resolve_model(TINY) else 128
    tokenizer, problems = load_tokenizer(model), load_problems("dclightning/arithmetic-train")[:8]
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    engine, sampling = engine_of(model, tokens), Sampling(max_tokens=tokens)
    scorer = Scorer({"length": lambda problems, completions: [float(len(c.text)) for c in completions]})

    def ours() -> float:
        completions, scores = respond(engine, tokenizer, problems, prompts, scorer, sampling, 8, 0)
        return float(Rollout.of(prompts, completions, scores, sampling, 8, 0).response_lengths.sum())

    def bare() -> float:
        parameters = SamplingParams(n=8, max_tokens=tokens, temperature=1.0, detokenize=False)
        engine._llm.reset_prefix_cache()
        torch.manual_seed(0)
        outputs = engine._llm.generate([tokens_input(ids) for ids in prompts], parameters, use_tqdm=False)
        return float(sum(len(one.token_ids) for output in outputs for one in output.outputs))

    return turns(rounds, ours=ours, beside=bare)


def of_equal_lengths(tokens: int) -> Rollout:
    """64 sequences of 16 and ``tokens`` random tokens; all prompts differ, so that none is shared."""
    count = 64
    return Rollout(
        token_ids=torch.randint(4, 100, (count * (16 + tokens),)),
        prompt_lengths=torch.full((count,), 16),
        response_lengths=torch.full((count,), tokens),
        rollout_logprobs=-torch.rand(count * tokens) - 0.1,
        rollout_ranks=torch.zeros(count * tokens, dtype=torch.int64),
        rewards=torch.arange(count) % 2.0,
        truncated=torch.zeros(count, dtype=torch.bool),
        group_size=8,
        temperature=1.0,
        max_tokens=tokens,
        weight_versions=torch.zeros(count, dtype=torch.int64),
    )


class Scoring(GRPOModule):
    """Computes when it predicts what a training step does for old log-probs, and no ranks."""

    def predict_step(self, rollout: Rollout, batch_idx: int) -> Any:
        """Log-probs and entropies."""
        return self._score(self.model, rollout, self.plan(rollout), ranks=False)[0]


def stepwise(model: str, rounds: int, method: str, plain: Callable[[Any, Any, Rollout], None]) -> Rounds:
    """A method of the module while it is fit, and the plain counterpart behind it, in turns."""
    rollout = of_equal_lengths(48)
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-6)
    module = Scoring(model, optimizer=AdamW(lr=1e-6), mini_batches=1)
    taken: Rounds = {"ours": [], "beside": []}
    work = getattr(module, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        start = cpu_seconds()
        found = work(*arguments, **options)
        middle = cpu_seconds()
        plain(other, optimizer, rollout)
        taken["ours"].append((middle - start) / len(rollout.token_ids))
        taken["beside"].append((cpu_seconds() - middle) / len(rollout.token_ids))
        return found

    setattr(module, method, timed)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[LagrangianCallback(0.1, 1.0, 0.001)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run = trainer.predict if method == "predict_step" else trainer.fit
    run(module, datamodule=GivenRollouts([rollout] * (rounds + 1)))
    return {name: seconds[1:] for name, seconds in taken.items()}


def update(model: str, rounds: int) -> Rounds:
    """A whole training step on a given rollout, and transformers' passes with AdamW on the same tokens. A token."""

    def plain(other: Any, optimizer: Any, rollout: Rollout) -> None:
        ids = rollout.token_ids.view(64, -1)
        logits = other(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=48).logits
        cross_entropy(logits.flatten(0, 1), ids[:, 16:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return stepwise(model, rounds, "training_step", plain)


def logprobs(model: str, rounds: int) -> Rounds:
    """Log-probs and entropies of a given rollout, and transformers' forward pass alone. A token."""

    def plain(other: Any, optimizer: Any, rollout: Rollout) -> None:
        other(input_ids=rollout.token_ids.view(64, -1)[:, :-1], use_cache=False, logits_to_keep=48)

    return stepwise(model, rounds, "predict_step", plain)


def sync(model: str, rounds: int) -> Rounds:
    """The engine takes all weights, and a copy of as many bytes."""
    engine, policy = engine_of(model, 64), load_policy(model)
    source = torch.cat([weight.flatten() for _, weight in named_weights(policy)])
    target = torch.zeros_like(source)

    def ours() -> float:
        engine.load_weights(named_weights(policy), 1)
        return 1.0

    def copy() -> float:
        target.copy_(source)
        return 1.0

    return turns(rounds, ours=ours, beside=copy)


def rewards(model: str, rounds: int) -> Rounds:
    """Verdicts on a response with a whole number in a box behind 6,000 characters; every fourth is a fraction."""
    text = r"We have $x^2 + \frac{1}{2} y = 3$, and so on. " * 130
    golds = [37 * i % 1000 for i in range(512)]
    answers = [rf"\frac{{{2 * gold}}}{{2}}" if i % 4 == 0 else gold + i % 2 for i, gold in enumerate(golds)]
    completions = [Completion([], [], "stop", rf"{text}The answer is $\boxed{{{answer}}}$.") for answer in answers]
    reward = MathReward()
    asked = [Problem(str(i), "", str(gold)) for i, gold in enumerate(golds)]

    def ours() -> float:
        reward(asked, completions)
        return len(asked)

    return turns(rounds, partial(cpu_seconds_of, os.getpid()), ours=ours)


def memory(model: str, rounds: int) -> Rounds:
    """Log-probs of 8,192 tokens of a vocabulary of 151,936 and their gradients, in GB beyond what was there before.

    With full logits, of a quarter of them.
    """
    count, vocabulary = 2048 if model == "full" else 8192, 151_936
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    ids = torch.randint(0, vocabulary, (count,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    if model == "full":
        found = policy(input_ids=ids.view(16, -1), use_cache=False).logits.float().flatten(0, 1).log_softmax(-1)
        found.gather(-1, ids[:, None]).sum().backward()
    else:
        policy.set_attn_implementation(PACKED)
        add_logprobs(policy, "float32")
        batch = Pack(
            input_ids=ids[None],
            position_ids=torch.arange(512).repeat(16)[None],
            lanes=lanes(torch.arange(count).split(512), ids.device),
            predictors=torch.arange(count),
            targets=ids,
            index=torch.arange(count),
            response_lengths=torch.full((16,), 512),
        )
        token_logprobs(policy, batch, 1.0, entropy=True, entropy_gradient=False).logprobs.sum().backward()
    return {"ours": [_peak() - before]}


def _peak() -> float:
    """Most memory so far, in GB; unlike ``ru_maxrss`` it does not begin with that of the process before an exec."""
    (peak,) = re.findall(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(peak) * 1024 / 1e9


if __name__ == "__main__":
    part, model, rounds = sys.argv[1:]
    L.seed_everything(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print("ROUNDS", json.dumps(globals()[part](model, int(rounds))))
    sys.stdout.flush()
    os._exit(0)
