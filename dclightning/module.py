"""GRPO as a LightningModule: score the rollout, charge the discrepancy, update the policy."""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import get_scheduler

from dclightning.advantages import group_advantages
from dclightning.discrepancy import DiscrepancyKind, discrepancy, discrepancy_statistics, mismatch_metrics
from dclightning.lagrangian import penalized_advantages
from dclightning.models import check_token_logprobs, load_policy, reshard, token_logprobs
from dclightning.packing import Pack, micro_batches, pack
from dclightning.phases import phases
from dclightning.policy_loss import PolicyLoss, clipped, clipped_surrogate, probability_ratio, token_weights
from dclightning.rollout.types import Rollout
from dclightning.strategies import clip_grad_norm, data_parallel_gather, data_parallel_group, data_parallel_reduce

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings; the defaults are the paper's."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients of an optimizer step are scaled down to this norm."""
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """How the learning rate moves from rollout to rollout."""
    warmup: int = 0
    """Rollouts over which the learning rate rises, for the schedules that have a warm-up."""

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr={self.lr}: must not be negative")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be positive; .inf turns clipping off")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must not be negative")


class GRPOModule(L.LightningModule):
    """Group-relative policy optimization on rollouts of another engine.

    One batch is one rollout and one training step: old log-probs, discrepancy, advantages, then ``mini_batches``
    optimizer steps. Without a callback that sets :attr:`penalty` this is plain GRPO.

    Args:
        model: A causal language model by hub name or folder, or one that ships with the package
            (``dclightning/tiny-arithmetic``).
        loss: The policy loss.
        discrepancy: How a token's discrepancy is measured.
        optimizer: The optimizer's settings.
        mini_batches: Optimizer steps to a rollout; they share its prompts evenly.
        micro_batch_tokens: Most tokens of a forward and backward pass. Memory depends on it, the result does not.
        normalize_std: Whether advantages are divided by their group's std (GRPO) or not (Dr. GRPO).
        gradient_checkpointing: Whether to recompute activations in the backward pass.
    """

    def __init__(
        self,
        model: str,
        loss: PolicyLoss = PolicyLoss(),
        discrepancy: DiscrepancyKind = "probability",
        optimizer: AdamW = AdamW(),
        mini_batches: int = 4,
        micro_batch_tokens: int = 16384,
        normalize_std: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if mini_batches < 1:
            raise ValueError(f"mini_batches={mini_batches}: must be at least 1")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}: must be at least 1")
        self.automatic_optimization = False
        self.model_name = model
        self.loss = loss
        self.discrepancy = discrepancy
        self.optimizer_settings = optimizer
        self.mini_batches = mini_batches
        self.micro_batch_tokens = micro_batch_tokens
        self.normalize_std = normalize_std
        self.gradient_checkpointing = gradient_checkpointing
        self.model: Any = None
        self.penalty: Callable[[Tensor], Tensor] | None = None
        """What tokens of the given discrepancies, (R,), are charged. Callbacks set it."""

    # Set-up

    def configure_model(self) -> None:
        """Load the policy, where the strategy wants it."""
        if self.model is None:
            self.model = load_policy(self.model_name, self.trainer.strategy, self.gradient_checkpointing)

    def configure_optimizers(self) -> Any:
        """AdamW, and a learning rate that moves once per rollout."""
        s = self.optimizer_settings
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay
        )
        rollouts = self._planned_rollouts() if s.schedule in ("linear", "cosine") else None
        return [optimizer], [get_scheduler(s.schedule, optimizer, s.warmup, rollouts)]

    def on_fit_start(self) -> None:
        """Refuse a model that the log-probs would be wrong for, and forget an earlier run's penalty."""
        check_token_logprobs(self.model, self.model_name)
        self.penalty = None

    def on_train_start(self) -> None:
        """Follow this run's own schedule: the checkpoint that it resumes from may have had a shorter one."""
        scheduler: Any = self.lr_schedulers()
        groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, lr, factor in groups:
            group["lr"] = lr * factor(scheduler.last_epoch)
        phases.take()

    def _planned_rollouts(self) -> int:
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps  # -1 is no limit
        _ = self.trainer.estimated_stepping_batches  # sets the loader up, and with it the number of batches
        limits = [epochs * self.trainer.num_training_batches] if epochs is not None and epochs >= 0 else []
        limits += [steps // self.mini_batches] if steps >= 0 else []
        if not limits:
            raise ValueError(
                f"schedule={self.optimizer_settings.schedule!r}: needs an end; set max_epochs or max_steps"
            )
        return int(min(limits))

    # The training step

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, Tensor]:
        """One step of DC-GRPO.

        Returns:
            For callbacks: ``delta`` and ``response_lengths`` of all ranks' responses, and this rank's ``ratio`` of each
            response token as the update saw it.
        """
        self._check_version(rollout)
        plan = self._plan(rollout)
        with phases("score"):
            old_logprobs, entropy = self._score(rollout, plan)
        delta = discrepancy(old_logprobs, rollout.rollout_logprobs, self.discrepancy)
        penalty = torch.zeros_like(delta) if self.penalty is None else self.penalty(delta)
        of_responses = group_advantages(rollout.rewards, rollout.group_size, normalize_std=self.normalize_std)
        advantages = penalized_advantages(of_responses.repeat_interleave(rollout.response_lengths), penalty)
        with phases("update"):
            ratio = self._update(rollout, plan, old_logprobs, advantages)
        everywhere = {
            "delta": self._gather(delta),
            "response_lengths": self._gather(rollout.response_lengths),
        }
        self._log_rollout(rollout, entropy, penalty)
        self._log_discrepancy(old_logprobs, rollout.rollout_logprobs, **everywhere)
        self._log_update(ratio, advantages)
        return {**everywhere, "ratio": ratio}

    def _plan(self, rollout: Rollout) -> list[list[Pack]]:
        """For each optimizer step its micro-batches: the same number on every rank, as sharded models need."""
        prompts, rest = divmod(len(rollout), rollout.group_size * self.mini_batches)
        if rest:
            raise ValueError(
                f"mini_batches={self.mini_batches}: must divide the prompts of a rollout on each rank, "
                f"{len(rollout) // rollout.group_size}"
            )
        size = prompts * rollout.group_size
        lengths = (rollout.prompt_lengths + rollout.response_lengths).split(size)
        counts = torch.tensor([len(micro_batches(part.tolist(), self.micro_batch_tokens)) for part in lengths])
        counts = data_parallel_reduce(self.trainer.strategy, counts.to(self.device), dist.ReduceOp.MAX)
        return [
            [
                pack(rollout, [mini * size + i for i in chosen])
                for chosen in micro_batches(part.tolist(), self.micro_batch_tokens, int(count))
            ]
            for mini, (part, count) in enumerate(zip(lengths, counts, strict=True))
        ]

    @torch.no_grad()
    def _score(self, rollout: Rollout, plan: list[list[Pack]]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the response tokens before the first update, in the update's micro-batches."""
        logprobs = torch.zeros_like(rollout.rollout_logprobs)
        entropy = torch.zeros_like(logprobs)
        for batch in (batch for mini in plan for batch in mini):
            logprobs[batch.index], entropy[batch.index] = token_logprobs(
                self.model, batch, rollout.temperature, entropy=True
            )
        reshard(self.model)
        return logprobs, entropy

    def _update(self, rollout: Rollout, plan: list[list[Pack]], old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """``mini_batches`` optimizer steps; returns the ratio of each response token as the update saw it."""
        optimizer: Any = self.optimizers()
        replicas, _ = data_parallel_group(self.trainer.strategy)
        ratio = torch.ones_like(old_logprobs)
        totals = defaultdict(list)
        for mini, lengths in zip(plan, rollout.response_lengths.chunk(len(plan)), strict=True):
            index = torch.cat([batch.index for batch in mini])
            tokens, responses, active = self._sum(
                torch.stack([lengths.sum(), (lengths > 0).sum(), (advantages[index] != 0).sum()])
            )
            weights = torch.zeros_like(advantages)
            weights[index.sort().values] = token_weights(lengths, self.loss, tokens, responses)
            loss = torch.zeros((), device=self.device)
            for batch in mini if active > 0 else []:
                logprobs, _ = token_logprobs(self.model, batch, rollout.temperature)
                r = probability_ratio(logprobs, old_logprobs[batch.index])
                objective = clipped_surrogate(r, advantages[batch.index], self.loss.clip_low, self.loss.clip_high)
                part = -(weights[batch.index] * objective).sum()
                self.manual_backward(part * replicas)  # gradients are averaged over ranks, the loss is a sum
                loss += part.detach()
                ratio[batch.index] = r.detach()
            totals["train/loss"].append(self._sum(loss))
            totals["train/grad_norm"].append(self._step(optimizer, int(tokens), int(active)))
        self.log_dict({name: torch.stack(values).mean() for name, values in totals.items()})
        self.log("train/lr", optimizer.param_groups[0]["lr"])
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return ratio

    def _step(self, optimizer: Any, tokens: int, active: int) -> Tensor:
        """Clip and step; returns the gradient's norm. Without a usable gradient nothing moves, but the step counts."""
        norm = torch.zeros((), device=self.device)
        if active > 0:
            norm = clip_grad_norm(self.model.parameters(), self.optimizer_settings.max_grad_norm)
        if tokens == 0:
            log.warning("No response has a token: the optimizer step is skipped")
        elif not norm.isfinite():
            log.warning("The gradient's norm is %s: the optimizer step is skipped", norm.item())
        if active == 0 or not norm.isfinite():
            optimizer.zero_grad()  # without gradients AdamW leaves parameters and momenta alone
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _check_version(self, rollout: Rollout) -> None:
        step = self.trainer.fit_loop.total_batch_idx
        if rollout.weight_version != step:
            log.warning(
                "Stale weights: rollout %d was sampled with the weights of step %d. Is the WeightSync callback there?",
                step,
                rollout.weight_version,
            )

    # Evaluation of the deployed policy

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._evaluated: dict[int, list[Tensor]] = defaultdict(list)

    def validation_step(self, rollout: Rollout, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sum up the rewards of the engine's policy, and the problems with a reward of at least 1."""
        rewards = rollout.rewards.nan_to_num(0.0).view(-1, rollout.group_size).double()
        sums = [
            rewards.mean(-1).sum(),
            (rewards >= 1).any(-1).double().sum(),
            rollout.response_lengths.double().sum() / rollout.group_size,
            rollout.truncated.double().sum() / rollout.group_size,
            rewards.new_tensor(float(len(rewards))),
        ]
        self._evaluated[dataloader_idx].append(torch.stack(sums))

    def on_validation_epoch_end(self) -> None:
        """Log avg@k (the mean reward), pass@k, mean length and truncated share of each benchmark."""
        phases.take()  # an evaluation is no part of a step
        stage = "test" if self.trainer.testing else "val"
        datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        k = datamodule.validation_samples
        metrics = {}
        for i, benchmark in enumerate(datamodule.benchmarks):
            total = self._sum(torch.stack(self._evaluated[i]).sum(0) if self._evaluated[i] else torch.zeros(5).double())
            names = (f"avg@{k}", f"pass@{k}", "response_length", "truncated_fraction")
            for name, value in zip(names, total[:-1] / total[-1], strict=True):
                metrics[f"{stage}/{benchmark}/deployed/{name}"] = value
        if self.trainer.sanity_checking:  # the evaluation before the first step, which Lightning would not log
            if self.logger is not None:
                self.logger.log_metrics({name: value.item() for name, value in metrics.items()}, step=0)
        else:
            self.log_dict(metrics)

    def on_test_epoch_start(self) -> None:
        """As for validation."""
        self.on_validation_epoch_start()

    def test_step(self, rollout: Rollout, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As for validation."""
        self.validation_step(rollout, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """As for validation."""
        self.on_validation_epoch_end()

    # What is logged

    def _log_rollout(self, rollout: Rollout, entropy: Tensor, penalty: Tensor) -> None:
        scored = ~rollout.rewards.isnan()
        self.log("train/reward", self._mean(rollout.rewards[scored]), prog_bar=True)
        self.log("train/unscored_fraction", self._mean(1 - scored.float()))
        self.log("train/response_length", self._mean(rollout.response_lengths))
        self.log("train/truncated_fraction", self._mean(rollout.truncated))
        self.log("train/entropy", self._mean(entropy))
        self.log("lagrangian/penalty_mean", self._mean(penalty))
        self.log("lagrangian/penalty_max", torch.cat([self._gather(penalty), penalty.new_zeros(1)]).max())
        self._tokens = self._sum(torch.stack([rollout.response_lengths.sum(), rollout.prompt_lengths.sum()]))

    def _log_discrepancy(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, delta: Tensor, response_lengths: Tensor
    ) -> None:
        if len(delta) == 0:
            return
        statistics = discrepancy_statistics(delta, response_lengths)
        self.log("discrepancy/sequence_mean", statistics.pop("discrepancy/sequence_mean").float(), prog_bar=True)
        self.log_dict({name: value.float() for name, value in statistics.items()})
        metrics = mismatch_metrics(self._gather(old_logprobs), self._gather(rollout_logprobs))
        self.log_dict({name: value.float() for name, value in metrics.items()})

    def _log_update(self, ratio: Tensor, advantages: Tensor) -> None:
        cut = clipped(ratio, advantages, self.loss.clip_low, self.loss.clip_high)
        self.log("train/clip_fraction", self._mean(cut))
        self.log("train/approx_kl", self._mean(ratio - 1 - ratio.log()))

    def on_train_batch_end(self, outputs: Any, batch: Rollout, batch_idx: int) -> None:
        """Log the times of the whole step, the callbacks' part included."""
        seconds = phases.take()
        self.log_dict({f"time/{name}_s": value for name, value in seconds.items()})
        response_tokens, prompt_tokens = self._tokens.tolist()
        self.log("perf/rollout_tokens_per_s", response_tokens / max(seconds.get("rollout", 0.0), 1e-9))
        self.log("perf/train_tokens_per_s", (response_tokens + prompt_tokens) / max(seconds["update"], 1e-9))

    def _sum(self, values: Tensor) -> Tensor:
        return data_parallel_reduce(self.trainer.strategy, values.to(self.device))

    def _gather(self, values: Tensor) -> Tensor:
        return data_parallel_gather(self.trainer.strategy, values)

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the values of all ranks; 0 if there are none."""
        values = values.double()
        total, count = self._sum(torch.stack([values.sum(), torch.ones_like(values).sum()]))
        return torch.div(total, count.clamp(min=1)).float()
