"""What DC-GRPO costs over truncated importance sampling in a training step: scoring, update and multiplier.

Both train on the same rollouts (random tokens, the model's log-probs a little off, no engine), in turns and on one
thread, so that what else the machine does hits both. TIS against itself shows how much of a difference is noise. Then
what one does and the other does not is timed by itself, which is the difference without the noise.

    python benchmarks/update_cost.py
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from given import GivenRollouts

from dclightning import AdamW, GRPOModule, Rollout, TokenTIS
from dclightning.callbacks import LagrangianCallback
from dclightning.corrections import corrected
from dclightning.discrepancy import discrepancy
from dclightning.lagrangian import dual_ascent, penalized_advantages
from dclightning.models import load_policy, token_logprobs
from dclightning.packing import pack


class Clock(L.Callback):
    """CPU seconds of each step, from the rollout being there to the callbacks before this one being done."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Start."""
        self.started = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop."""
        self.seconds.append(time.process_time() - self.started)


@torch.no_grad()
def draw(model: str, step: int, responses: int, longest: int) -> Rollout:
    """A rollout of random tokens, with the model's log-probs a little off, as another engine's are."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(longest // 2, longest + 1, (responses,), generator=generator)
    prompts = torch.full((responses,), 16)
    rollout = Rollout(
        token_ids=torch.randint(4, 100, (int((prompts + lengths).sum()),), generator=generator),
        prompt_lengths=prompts,
        response_lengths=lengths,
        rollout_logprobs=torch.zeros(int(lengths.sum())),
        rollout_ranks=torch.ones(int(lengths.sum()), dtype=torch.int64),
        rewards=torch.randint(0, 2, (responses,), generator=generator).float(),
        truncated=torch.zeros(responses, dtype=torch.bool),
        group_size=8,
        temperature=1.0,
        max_tokens=longest,
        weight_versions=torch.full((responses,), step),
    )
    policy = load_policy(model)
    for i in range(0, responses, 32):
        part = pack(rollout, list(range(i, min(i + 32, responses))))
        rollout.rollout_logprobs[part.index] = token_logprobs(policy, part, 1.0)[0]
    rollout.rollout_logprobs += 0.02 * torch.randn(len(rollout.rollout_logprobs), generator=generator)
    return rollout


def seconds(model: str, rollouts: list[Rollout], *, tis: bool) -> list[float]:
    """CPU seconds of each step of one short training, the first left out."""
    clock = Clock()
    module = GRPOModule(
        model,
        corrections=[TokenTIS()] if tis else [],
        optimizer=AdamW(lr=1e-6),
        mini_batches=1,
        micro_batch_tokens=4096,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[*([] if tis else [LagrangianCallback(0.1, 1.0, 0.001)]), clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, GivenRollouts(rollouts))
    return clock.seconds[1:]


def own_work(rollout: Rollout) -> dict[str, float]:
    """CPU seconds of what each method alone does in a step."""
    lengths, sampled = rollout.response_lengths, rollout.rollout_logprobs
    old = sampled + 0.02 * torch.randn_like(sampled)
    multiplier = LagrangianCallback(0.1, 1.0, 0.001)

    def dc_grpo() -> None:
        delta = discrepancy(old, sampled)
        penalized_advantages(sampled, multiplier.penalty(delta))
        mean = multiplier.mean_discrepancy({"delta": delta, "response_lengths": lengths})
        dual_ascent(multiplier.multiplier, mean, multiplier.budget, multiplier.lr, multiplier.bounds)

    def tis() -> None:
        weights, keep = corrected([TokenTIS()], old - sampled, lengths)
        weights * sampled * keep

    def cost(work: Callable[[], None]) -> float:
        return min(timeit.repeat(work, timer=time.process_time, number=20, repeat=20)) / 20

    return {"DC-GRPO": cost(dc_grpo), "TIS": cost(tis)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="dclightning/tiny-arithmetic", help="a model by name or folder")
    parser.add_argument("--responses", type=int, default=64, help="responses in a rollout, a multiple of 8")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest response; the shortest has half")
    parser.add_argument("--rounds", type=int, default=10, help="how often each takes its turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rollouts = [draw(options.model, step, options.responses, options.longest) for step in range(6)]
    turns: dict[str, list[float]] = {"TIS": [], "DC-GRPO": [], "TIS again": []}
    for _ in range(options.rounds):
        for name, taken in turns.items():
            taken.append(statistics.median(seconds(options.model, rollouts, tis=name != "DC-GRPO")))
    print(
        f"{torch.get_num_threads()} threads, {options.rounds} rounds of {len(rollouts) - 1} steps, CPU seconds a step"
    )
    for name, taken in turns.items():
        extra = statistics.median(b / a - 1 for a, b in zip(turns["TIS"], taken, strict=True))
        print(f"{name:<10} median {statistics.median(taken):.4f}   extra over TIS, median of the rounds: {extra:+.2%}")
    own, step = own_work(rollouts[0]), statistics.median(turns["TIS"])
    difference = own["DC-GRPO"] - own["TIS"]
    print(
        f"by itself: DC-GRPO {own['DC-GRPO']:.2e}, TIS {own['TIS']:.2e}, difference {difference / step:+.3%} of a step"
    )


if __name__ == "__main__":
    main()
