"""DC-GRPO in a plain Fabric loop, without the Trainer: ``python examples/fabric_loop.py --rollouts 20``."""

import argparse
import os
import random
from contextlib import closing
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.distributed import ReduceOp

from dclightning import MathReward, PPOClip, Rollout, Sampling, VLLMEngine
from dclightning.advantages import advantages
from dclightning.data.problems import Problem, load_problems
from dclightning.discrepancy import discrepancy, sequence_mean
from dclightning.lagrangian import dual_ascent, penalized_advantages
from dclightning.models import load_policy, load_tokenizer, named_weights, resolve_model, token_logprobs
from dclightning.packing import plan
from dclightning.policy_loss import token_weights
from dclightning.ragged import spread
from dclightning.rewards.scoring import Scorer
from dclightning.rollout.responses import encode_prompt, respond
from dclightning.seeds import derive_seed
from dclightning.strategies import clip_grad_norm, data_parallel_gather, data_parallel_group, data_parallel_reduce

MODEL, PROBLEMS, GROUP_SIZE, SAMPLING = "dclightning/tiny-arithmetic", "dclightning/arithmetic-train", 8, Sampling(64)
LR, EPS, MAX_NORM, MINI_BATCHES, MICRO_BATCH_TOKENS, CLIP = 1e-4, 1e-15, 1.0, 2, 4096, PPOClip()
INITIAL, DUAL_LR, BUDGET, BOUNDS = 0.5, 300.0, 0.0012, (0.0, 1.0)  # the quickstart's


def draw(engine: Any, tokenizer: Any, problems: list[Problem], scorer: Scorer, seed: int) -> Rollout:
    """Sample a group of responses to each problem, and score them."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    completions, scores = respond(engine, tokenizer, problems, prompts, scorer, SAMPLING, GROUP_SIZE, seed)
    return Rollout.of(prompts, completions, scores, SAMPLING, GROUP_SIZE, engine.version)


def step(fabric: Fabric, model: Any, optimizer: Any, rollout: Rollout, multiplier: float) -> tuple[Any, ...]:
    """Learn from a rollout: losses and gradient norms of the optimizer steps, mean discrepancy, next multiplier."""
    everywhere = partial(data_parallel_reduce, fabric.strategy)
    steps = plan(rollout, MINI_BATCHES, MICRO_BATCH_TOKENS, partial(everywhere, op=ReduceOp.MAX))
    old = torch.empty_like(rollout.rollout_logprobs)
    with torch.no_grad():
        for batch in (batch for batches in steps for batch in batches):
            old[batch.index] = token_logprobs(model, batch, rollout.temperature).logprobs
    delta, lengths = discrepancy(old, rollout.rollout_logprobs), rollout.response_lengths
    of_tokens = spread(advantages(rollout.rewards, rollout.group_size), lengths)
    penalized = penalized_advantages(of_tokens, multiplier * delta)
    losses, norms = [], []
    for batches in steps:
        counts = [[len(b.index), (b.response_lengths > 0).sum(), (penalized[b.index] != 0).sum()] for b in batches]
        tokens, responses, active = everywhere(torch.tensor(counts).sum(0))
        losses.append(torch.zeros(()))
        for batch in batches if active else []:  # without a gradient even the momenta stay
            i, logprobs = batch.index, token_logprobs(model, batch, rollout.temperature).logprobs
            objective, _ = CLIP(logprobs, old[i], rollout.rollout_logprobs[i], penalized[i], batch.response_lengths)
            keep = torch.ones_like(objective, dtype=torch.bool)
            loss = -(token_weights(batch.response_lengths, keep, tokens, responses, "token") * objective).sum()
            fabric.backward(loss * data_parallel_group(fabric.strategy)[0])  # gradients are averaged over ranks
            losses[-1] += loss.detach()
        losses[-1] = everywhere(losses[-1])
        norms.append(clip_grad_norm(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    mean = sequence_mean(*(data_parallel_gather(fabric.strategy, values) for values in (delta, lengths))).item()
    return losses, norms, mean, dual_ascent(multiplier, mean, BUDGET, DUAL_LR, BOUNDS)


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    """The policy and its optimizer."""
    policy = load_policy(MODEL, fabric.strategy)
    adamw = torch.optim.AdamW(policy.parameters(), LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    model, optimizer = fabric.setup(policy, adamw)
    model.mark_forward_method("token_logprobs")
    return model, optimizer


def main() -> None:
    """Teach the bundled model arithmetic."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"rollouts": 20, "prompts": 32, "devices": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args, multiplier = parser.parse_args(), INITIAL
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # what it says would stand between the lines
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy="ddp" if args.devices > 1 else "auto")
    fabric.launch()
    model, optimizer = set_up(fabric)
    tokenizer, problems = load_tokenizer(MODEL), load_problems(PROBLEMS)
    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    with closing(engine), closing(Scorer({"math": MathReward()})) as scorer:
        engine.start(resolve_model(MODEL), model.config.max_position_embeddings)
        for number in range(args.rollouts):
            chosen = random.Random(derive_seed(args.seed, "problems", number)).sample(problems, args.prompts)
            seed = derive_seed(args.seed, "rollout", number, fabric.global_rank)
            rollout = draw(engine, tokenizer, chosen[fabric.global_rank :: fabric.world_size], scorer, seed)
            *_, mean, following = step(fabric, model, optimizer, rollout, multiplier)
            engine.load_weights(named_weights(model.module), number + 1)
            reward = data_parallel_gather(fabric.strategy, rollout.rewards).nanmean()
            fabric.print(f"{number}: reward {reward:.3f}, δ̄ {mean:.6f}, λ {multiplier:.3f}")
            multiplier = following


if __name__ == "__main__":
    main()
