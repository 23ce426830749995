"""GRPO as a LightningModule: score the rollout, charge the discrepancy, update the policy."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import get_scheduler

from dclightning.accuracy import ProblemMeans
from dclightning.advantages import AdvantageKind, advantages, soft_length_penalty
from dclightning.corrections import Correction, check_corrections, corrected
from dclightning.discrepancy import DiscrepancyKind, discrepancy
from dclightning.errors import UserError, check_choice, check_type
from dclightning.evaluation import Evaluated, measures
from dclightning.lagrangian import penalized_advantages
from dclightning.lora import LoRA, is_adapter, without_adapters
from dclightning.loss_scale import LossScale
from dclightning.metrics import Discrepancy, ImportanceWeights, Means, Mismatch
from dclightning.models import (
    Precision,
    TokenScores,
    check_token_logprobs,
    load_policy,
    named_weights,
    reshard,
    token_logprobs,
)
from dclightning.optimizer import AdamW
from dclightning.packing import Pack, plan
from dclightning.phases import phases
from dclightning.policy_loss import Aggregation, PolicyLoss, PPOClip, approx_kl, probability_ratio, token_weights
from dclightning.ragged import segment_sum, spread
from dclightning.reference_kl import ReferenceKL, reference_kl
from dclightning.rollout.datamodule import RolloutDataModule
from dclightning.rollout.types import Rollout
from dclightning.routing import agreement, check_replay, recorded, replayed
from dclightning.strategies import clip_grad_norm, data_parallel_gather, data_parallel_group, data_parallel_reduce

log = logging.getLogger(__name__)

ONE_STEP_OFF = "data.one_step_off: must be what the checkpoint was saved with"

OF_RESPONSES = (
    "reward",
    "unscored_fraction",
    "response_length",
    "truncated_fraction",
    "weight_lag",
    "length_penalty",
)
OF_TOKENS = (
    "entropy",
    "routing_agreement",
    "reference_kl",
    "approx_kl",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
)
MEANS = (
    *(f"train/{name}" for name in ("discarded_per_group", *OF_RESPONSES, "loss", "grad_norm", *OF_TOKENS)),
    *("discrepancy/kept_mean", "lagrangian/penalty_mean"),
)
"""What is logged as a mean over the responses or tokens of a step."""


@dataclass(frozen=True)
class Overlong:
    """What becomes of responses that are long, or cut off; the rewards that are logged do not change."""

    mask: bool = False
    """Whether truncated responses are left out of the loss and of the discrepancy. Their rewards still count in their
    groups."""
    buffer: float = 0.0
    """The end of the longest response, as a share of it, over which a penalty rises linearly from 0 to 1; 0 turns it
    off, DAPO has 0.2."""

    def __post_init__(self) -> None:
        if not 0 <= self.buffer <= 1:
            raise ValueError(f"overlong.buffer={self.buffer}: must be a share of max_tokens, from 0 to 1")


@dataclass(frozen=True)
class _Given:
    """What an update takes as given: constants of the step, one for each response token, (R,)."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    reference_logprobs: Tensor
    advantages: Tensor
    """The penalty is in them."""
    weights: Tensor
    """Of the corrections."""
    keep: Tensor
    """Which tokens take part in the loss. bool"""

    def __getitem__(self, index: Tensor) -> "_Given":
        return _Given(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def _drop_all_but_adapters(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if not is_adapter(name)]:
        del state[name]


class GRPOModule(L.LightningModule):
    """Group-relative policy optimization on rollouts of another engine.

    One batch is one rollout and one training step: old log-probs, discrepancy, advantages, then ``mini_batches``
    optimizer steps. Without a callback that sets :attr:`penalty` this is plain GRPO.

    Args:
        model: A causal language model by hub name or folder, or one that ships with the package
            (``dclightning/tiny-arithmetic``).
        loss: The policy loss.
        aggregation: How tokens are weighed against each other: ``token``, ``sequence`` or ``sequence-sum-norm``.
        norm_length: The constant length of ``sequence-sum-norm``, in tokens; None takes that of the longest response.
        advantage: What a response is compared with, and the scale.
        discrepancy: How a token's discrepancy is measured.
        corrections: Weights and masks for the gap between the two policies, stacked.
        overlong: What becomes of responses that are long, or cut off.
        reference_kl: The price of moving away from the policy that training started from.
        entropy_bonus: The weight of the policy's entropy in the objective.
        lora: Adapters that are trained while the model's own weights stay as they are; None trains these.
        optimizer: The optimizer's settings.
        mini_batches: Optimizer steps to a rollout; they share its prompts evenly.
        micro_batch_tokens: Most tokens of a forward and backward pass. Memory depends on it, the result does not.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        precision: What the training policy computes in: ``float32``, ``bfloat16`` or ``float16``. Parameters, gradients
            and optimizer are FP32 with any of them; in FP16 the loss is scaled, so that gradients do not underflow.
    """

    def __init__(
        self,
        model: str,
        loss: PolicyLoss = PPOClip(),
        aggregation: Aggregation = "token",
        norm_length: int | None = None,
        advantage: AdvantageKind = "grpo",
        discrepancy: DiscrepancyKind = "probability",
        corrections: Sequence[Correction] = (),
        overlong: Overlong = Overlong(),
        reference_kl: ReferenceKL = ReferenceKL(),
        entropy_bonus: float = 0.0,
        lora: LoRA | None = None,
        optimizer: AdamW = AdamW(),
        mini_batches: int = 4,
        micro_batch_tokens: int = 16384,
        gradient_checkpointing: bool = False,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        if mini_batches < 1:
            raise ValueError(f"mini_batches={mini_batches}: must be at least 1")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}: must be at least 1")
        if norm_length is not None and norm_length < 1:
            raise ValueError(f"norm_length={norm_length}: must be at least 1")
        if not entropy_bonus >= 0:
            raise ValueError(f"entropy_bonus={entropy_bonus}: must not be negative")
        check_type("loss", loss, PolicyLoss)
        for correction in corrections if isinstance(corrections, Sequence) else [corrections]:
            check_type("corrections", correction, Correction)
        check_type("overlong", overlong, Overlong)
        check_type("reference_kl", reference_kl, ReferenceKL)
        check_type("optimizer", optimizer, AdamW)
        if lora is not None:
            check_type("lora", lora, LoRA)
        check_choice("aggregation", aggregation, Aggregation)
        check_choice("advantage", advantage, AdvantageKind)
        check_choice("discrepancy", discrepancy, DiscrepancyKind)
        check_choice("precision", precision, Precision)
        check_corrections(corrections, loss.uses_inference_ratio)
        self.automatic_optimization = False
        self.model_name = model
        self.loss = loss
        self.aggregation: Aggregation = aggregation
        self.norm_length = norm_length
        self.advantage: AdvantageKind = advantage
        self.discrepancy: DiscrepancyKind = discrepancy
        self.corrections = corrections if isinstance(corrections, Sequence) else [corrections]
        self.overlong = overlong
        self.reference_kl = reference_kl
        self.entropy_bonus = entropy_bonus
        self.lora = lora
        self.optimizer_settings = optimizer
        self.mini_batches = mini_batches
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.precision: Precision = precision
        self.loss_scale = LossScale() if precision == "float16" else None
        self.model: Any = None
        if lora is not None:  # checkpoints hold the adapters; all the rest is in the model's own files
            self.strict_loading = False
            self.register_state_dict_post_hook(_drop_all_but_adapters)  # type: ignore[no-untyped-call]
        self.reference: Any
        # Not registered as a part of the module: it is neither trained nor saved.
        self.__dict__["reference"] = None
        self.sampling_policy: Any = None
        """The policy as it was when the rollout was sampled, if that is not the policy of now (``one_step_off``)."""
        self.sampling_version = 0
        """Training steps that it has seen."""
        self.penalty: Callable[[Tensor], Tensor] | None = None
        """What tokens of the given discrepancies, (R,), are charged. Callbacks set it as a training starts."""
        self.ranks_wanted = False
        """Whether the next step's ``scores`` shall have ranks. Callbacks set it as a batch starts."""

    # Set-up

    def configure_model(self) -> None:
        """Load the policy, where the strategy wants it."""
        seed = getattr(self._datamodule, "seed", 0)
        if self.model is None:
            self.model = load_policy(
                self.model_name, self.trainer.strategy, self.gradient_checkpointing, self.precision, self.lora, seed
            )
        if self.reference_kl.coefficient and self.trainer.state.fn == "fit" and self.reference is None:
            if self.lora is None:
                reference = load_policy(self.model_name, self.trainer.strategy, precision=self.precision)
                self.__dict__["reference"] = reference.requires_grad_(False)
            else:  # without its adapters
                self.__dict__["reference"] = self.model
        if not self._one_step_off:
            self.sampling_policy = None
            return
        if self.sampling_policy is None:
            policy = load_policy(
                self.model_name, self.trainer.strategy, precision=self.precision, lora=self.lora, seed=seed
            )
            self.sampling_policy = policy.requires_grad_(False)
        self.follow(0)  # the module may have been trained before

    def configure_optimizers(self) -> Any:
        """AdamW, and a learning rate that moves once per rollout."""
        s = self.optimizer_settings
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay)
        rollouts = self._planned_rollouts() if s.schedule in ("linear", "cosine") else None
        return [optimizer], [get_scheduler(s.schedule, optimizer, s.warmup, rollouts)]

    def on_predict_start(self) -> None:
        """Prepare for scoring; a run that only measures has no other start."""
        self._prepare_scoring()

    def _prepare_scoring(self) -> None:
        """Refuse what would be wrong: another precision, models that log-probs or replay would be wrong for."""
        if self.trainer.precision != "32-true":
            raise UserError(
                f"trainer.precision={self.trainer.precision}: must be 32-true, for parameters stay FP32; what is "
                "computed in is model.precision"
            )
        check_token_logprobs(self.model, self.model_name)
        engine = getattr(self._datamodule, "engine", None)
        if getattr(engine, "routing_replay", False):
            check_replay(self.model)
        replicas, group = data_parallel_group(self.trainer.strategy)
        options = {"process_group": group, "sync_on_compute": replicas > 1}
        self.means = Means(*MEANS, **options).to(self.device)
        self.of_discrepancy = Discrepancy(sync_on_compute=False).to(self.device)  # sees the tokens of all ranks
        self.of_mismatch = Mismatch(**options).to(self.device)
        self.of_weights = ImportanceWeights(**options).to(self.device)
        self._logged: list[str] = []

    def on_fit_start(self) -> None:
        """Prepare for scoring, and forget an earlier run's penalty."""
        self._prepare_scoring()
        self.penalty = None
        if self.reference is not None:
            self.reference.to(self.device)

    def on_train_start(self) -> None:
        """Follow this run's own schedule: the checkpoint that it resumes from may have had a shorter one."""
        scheduler: Any = self.lr_schedulers()
        groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, lr, factor in groups:
            group["lr"] = lr * factor(scheduler.last_epoch)
        phases.take()
        datamodule = self._datamodule
        if self.penalty is not None and getattr(datamodule, "dynamic_sampling", None):
            log.warning(
                "dynamic_sampling=%d changes the method: groups of equal rewards, which would still pay for their "
                "discrepancy, are replaced",
                datamodule.dynamic_sampling,
            )

    @property
    def _one_step_off(self) -> bool:
        return bool(getattr(self._datamodule, "one_step_off", False))

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)

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

    def on_train_batch_start(self, batch: Rollout, batch_idx: int) -> None:
        """Let the engine draw the next rollout meanwhile, or make room; callbacks are through with it."""
        if isinstance(self._datamodule, RolloutDataModule):
            last_batch = self.trainer.is_last_batch and self.trainer.current_epoch + 1 == self.trainer.max_epochs
            last_step = 0 <= self.trainer.max_steps <= self.trainer.global_step + self.mini_batches
            self._datamodule.during_update(last=last_batch or last_step)

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, Any]:
        """One step of DC-GRPO.

        Returns:
            For callbacks: ``delta`` and ``response_lengths`` of all ranks' responses, and this rank's ``ratio`` of each
            response token as the update saw it. Responses that are masked for being truncated are in none of them.
            ``scores``, of all of this rank's response tokens, is what the policy said of them before the update; with
            ranks if they were wanted.
        """
        self._check_version(rollout)
        packs = self.plan(rollout)
        with phases("score"):
            policy = self.model if self.sampling_policy is None else self.sampling_policy
            # One micro-batch is passed once, for both; but not where the reference is the policy without its adapters.
            once = [len(mini) for mini in packs] == [1] and policy is self.model and self.reference is not self.model
            scores, reference_logprobs, passed = self._score(policy, rollout, packs, self.ranks_wanted, once)
            self.ranks_wanted = False
        if self.sampling_policy is not None:
            self.follow(self.trainer.fit_loop.total_batch_idx)
        old_logprobs = scores.logprobs
        delta = discrepancy(old_logprobs, rollout.rollout_logprobs, self.discrepancy)
        lengths = rollout.response_lengths
        valid = ~rollout.truncated if self.overlong.mask else torch.ones_like(rollout.truncated)
        tokens = spread(valid, lengths)
        penalty = torch.zeros_like(delta)
        if self.penalty is not None:
            penalty[tokens] = self.penalty(delta[tokens])
        of_tokens = spread(self._advantages(rollout), lengths)
        weights, keep = corrected(self.corrections, old_logprobs - rollout.rollout_logprobs, lengths)
        given = _Given(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout.rollout_logprobs,
            reference_logprobs=reference_logprobs,
            advantages=penalized_advantages(of_tokens, penalty),
            weights=weights,
            keep=keep & tokens,
        )
        with phases("update"):
            ratio = self._update(rollout, packs, given, passed)
        self._measure(rollout, tokens, scores.entropy, penalty)
        if self.corrections:
            self.means.update({"discrepancy/kept_mean": delta[given.keep]})
            self.of_weights.update(weights[tokens], keep[tokens])
        everywhere = {"delta": self._gather(delta[tokens]), "response_lengths": self._gather(lengths[valid])}
        self.of_discrepancy.update(*everywhere.values())
        self.of_mismatch.update(old_logprobs[tokens], rollout.rollout_logprobs[tokens])
        self._log_metrics()
        return {**everywhere, "ratio": ratio[tokens], "scores": scores}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """From now on rollouts are sampled with the weights of now, which have seen ``version`` training steps."""
        for held, weight in zip(self.sampling_policy.parameters(), self.model.parameters(), strict=True):
            held.copy_(weight)
        self.sampling_version = version

    def predict_step(self, rollout: Rollout, batch_idx: int) -> TokenScores:
        """What the training policy says of a rollout's response tokens, ranks included; nothing is learnt."""
        return self._score(self.model, rollout, self.plan(rollout), ranks=True)[0]

    def _advantages(self, rollout: Rollout) -> Tensor:
        """One for each response, (B,), from its reward less the penalty for its length."""
        buffer = self.overlong.buffer * rollout.max_tokens
        penalty = soft_length_penalty(rollout.response_lengths, rollout.max_tokens, buffer)
        if self.overlong.buffer:
            self.means.update({"train/length_penalty": penalty})
        rewards = rollout.rewards - penalty
        everyones = self._gather(rewards) if self.advantage in ("batch-std", "batch") else None
        return advantages(rewards, rollout.group_size, self.advantage, everyones)

    def plan(self, rollout: Rollout) -> list[list[Pack]]:
        """For each optimizer step its micro-batches: the same number on every rank, as sharded models need."""
        if len(rollout) % (rollout.group_size * self.mini_batches):
            raise ValueError(
                f"mini_batches={self.mini_batches}: must divide the prompts of a rollout on each rank, "
                f"{len(rollout) // rollout.group_size}"
            )

        def most(counts: Tensor) -> Tensor:
            return data_parallel_reduce(self.trainer.strategy, counts.to(self.device), dist.ReduceOp.MAX)

        return plan(rollout, self.mini_batches, self.micro_batch_tokens, most)

    def _score(
        self, policy: Any, rollout: Rollout, packs: list[list[Pack]], ranks: bool, once: bool = False
    ) -> tuple[TokenScores, Tensor, TokenScores | None]:
        """What the policy that sampled them says of the response tokens, in the update's micro-batches.

        And the reference policy's log-probs; zeros where there is none. And with ``once`` the scores of the only
        micro-batch with their gradients, which the update's own pass would compute again.
        """
        logprobs, entropy, reference = torch.zeros_like(rollout.rollout_logprobs).expand(3, -1).clone()
        scores = TokenScores(logprobs, entropy, torch.zeros_like(rollout.rollout_ranks))
        passed = None
        for batch in (batch for mini in packs for batch in mini):
            with torch.set_grad_enabled(once), replayed(policy, batch.experts), self._routing_watched(policy, batch):
                passed = token_logprobs(
                    policy, batch, rollout.temperature, True, ranks, entropy_gradient=self.entropy_bonus > 0
                )
            for whole, part in zip(scores, passed, strict=True):
                whole[batch.index] = part.detach()
            if self.reference is not None:
                with torch.no_grad(), without_adapters(self.reference):
                    reference[batch.index] = token_logprobs(self.reference, batch, rollout.temperature).logprobs
        if not once:
            reshard(policy)
        if self.reference is not None:
            reshard(self.reference)
        return scores, reference, passed if once else None

    @contextmanager
    def _routing_watched(self, policy: Any, batch: Pack) -> Iterator[None]:
        """Measure how many of the engine's experts the trainer's routers would have chosen, too."""
        if batch.experts is None:
            yield
            return
        with recorded(policy, len(batch.experts)) as own:
            yield
        at = batch.predictors  # prompts are in the row once, however many responses they have
        self.means.update({"train/routing_agreement": agreement(own[at], batch.experts[at])})

    def _update(self, rollout: Rollout, packs: list[list[Pack]], given: _Given, passed: TokenScores | None) -> Tensor:
        """``mini_batches`` optimizer steps; returns the ratio of each response token as the update saw it."""
        optimizer: Any = self.optimizers()
        replicas, _ = data_parallel_group(self.trainer.strategy)
        regularised = bool(self.reference_kl.coefficient or self.entropy_bonus)
        # What has a gradient: a token whose advantage is zero has none, unless something else pulls at the policy.
        active = given.keep & (regularised | ((given.advantages != 0) & (given.weights != 0)))
        ratio = torch.ones_like(given.old_logprobs)
        for mini, lengths in zip(packs, rollout.response_lengths.chunk(len(packs)), strict=True):
            index = torch.cat([batch.index for batch in mini]).sort().values
            keep = given.keep[index]
            responses = (segment_sum(keep, lengths) > 0).sum()
            counts = self._sum(torch.stack([keep.sum(), responses, active[index].sum()]))
            weights = torch.zeros_like(ratio)
            weights[index] = token_weights(
                lengths, keep, counts[0], counts[1], self.aggregation, self.norm_length or rollout.max_tokens
            )
            loss = torch.zeros((), device=self.device)
            if counts[2] == 0 and passed is not None:
                reshard(self.model)
            for batch in mini if counts[2] > 0 else []:
                with replayed(self.model, batch.experts):
                    logprobs, entropy, _ = passed or token_logprobs(
                        self.model, batch, rollout.temperature, entropy=self.entropy_bonus > 0
                    )
                objective = self._objective(logprobs, entropy, given[batch.index], batch.response_lengths)
                part = -(weights[batch.index] * objective).sum()
                # Gradients are averaged over ranks, the loss is a sum.
                self.manual_backward(part * replicas * (self.loss_scale.value if self.loss_scale else 1.0))
                loss += part.detach()
                ratio[batch.index] = probability_ratio(logprobs.detach(), given.old_logprobs[batch.index])
            self.means.update({"train/loss": self._sum(loss)})
            self.means.update({"train/grad_norm": self._step(optimizer, int(counts[0]), int(counts[2]))})
        self.log("train/lr", optimizer.param_groups[0]["lr"])
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return ratio

    def _objective(self, logprobs: Tensor, entropy: Tensor, given: _Given, lengths: Tensor) -> Tensor:
        """What each token of some whole responses adds to the objective, (R,)."""
        objective, side = self.loss(logprobs, given.old_logprobs, given.rollout_logprobs, given.advantages, lengths)
        objective = given.weights * objective
        cut = side[given.keep]
        measured = {
            "train/clip_fraction": cut != 0,
            "train/clip_fraction_low": cut < 0,
            "train/clip_fraction_high": cut > 0,
            "train/approx_kl": approx_kl(logprobs.detach(), given.old_logprobs)[given.keep],
        }
        if self.reference_kl.coefficient:
            kl = reference_kl(logprobs, given.old_logprobs, given.reference_logprobs, self.reference_kl.estimator)
            objective = objective - self.reference_kl.coefficient * kl
            measured["train/reference_kl"] = kl.detach()[given.keep]
        if self.entropy_bonus:
            objective = objective + self.entropy_bonus * entropy
        self.means.update(measured)
        return objective

    def _step(self, optimizer: Any, tokens: int, active: int) -> Tensor:
        """Clip and step; returns the gradient's norm. Without a usable gradient nothing moves, but the step counts."""
        norm = torch.zeros((), device=self.device)
        if active > 0:
            norm = self._unscaled_and_clipped()
        if tokens == 0:
            log.warning("No token is left to train on: the optimizer step is skipped")
        elif not norm.isfinite():
            log.warning("The gradient's norm is %s: the optimizer step is skipped", norm.item())
        if active == 0 or not norm.isfinite():
            optimizer.zero_grad()  # without gradients AdamW leaves parameters and momenta alone
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _unscaled_and_clipped(self) -> Tensor:
        if self.loss_scale:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale.value
        norm = clip_grad_norm(self.model.parameters(), self.optimizer_settings.max_grad_norm)
        if self.loss_scale:
            self.log("train/loss_scale", self.loss_scale.value)
            self.loss_scale.update(bool(norm.isfinite()))
        return norm

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the loss scale, the adapters' settings, and which weights the next rollout is sampled with."""
        if self.loss_scale:
            checkpoint["loss_scale"] = vars(self.loss_scale)
        if self.lora is not None:
            checkpoint["lora"] = asdict(self.lora)
        checkpoint["one_step_off"] = self._one_step_off
        checkpoint["sampling_version"] = self.sampling_version

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with them; weights of other adapters are refused."""
        if (saved := checkpoint.get("lora")) != (self.lora and asdict(self.lora)):
            raise UserError(f"model.lora={self.lora}: the checkpoint is of lora={saved}")
        if checkpoint.get("one_step_off", False) != self._one_step_off:
            raise UserError(ONE_STEP_OFF)
        if self.loss_scale and "loss_scale" in checkpoint:
            self.loss_scale = LossScale(**checkpoint["loss_scale"])
        self.sampling_version = checkpoint.get("sampling_version", 0)

    def _check_version(self, rollout: Rollout) -> None:
        step = self.trainer.fit_loop.total_batch_idx
        sampled_with = step if self.sampling_policy is None else self.sampling_version
        if (rollout.weight_versions != sampled_with).any():
            log.warning(
                "Stale weights: rollout %d was sampled with the weights of step %d, and not of step %d. "
                "Is the WeightSync callback there?",
                step,
                rollout.weight_versions.min(),
                sampled_with,
            )

    # Evaluation of the deployed policy, and of the training policy if it is asked for

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation, and give the training policy's own engine its weights, if there is one."""
        self._results: dict[int, list[Evaluated]] = defaultdict(list)
        datamodule = self._datamodule
        if datamodule.training_engine is not None:
            datamodule.training_engine.load_weights(
                named_weights(self.model), self.trainer.fit_loop.total_batch_idx + 1
            )

    def validation_step(self, results: list[Evaluated], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep what the responses to some problems are worth."""
        self._results[dataloader_idx] += results

    def on_validation_epoch_end(self) -> None:
        """Log what is measured on each benchmark, with intervals; with both policies, also how far they are apart."""
        phases.take()  # an evaluation is no part of a step
        stage = "test" if self.trainer.testing else "val"
        datamodule = self._datamodule
        datamodule.end_validation()
        metrics: dict[str, float] = {}
        for place, (benchmark, policy) in enumerate(datamodule.evaluations):
            k, majority = datamodule.samples[benchmark], datamodule.has_majorities
            values = measures(self._results[place], k, majority)
            metrics |= self._with_intervals(f"{stage}/{benchmark}/{policy}", values)
            if policy == "training":  # each problem's own difference, right behind the deployed policy's
                deployed = measures(self._results[place - 1], k, majority)
                gap = {name: deployed[name] - values[name] for name in values if "@" in name}
                metrics |= self._with_intervals(f"{stage}/{benchmark}/deployed-training", gap)
        # At the number of rollouts that the policy has learnt from; Lightning would log at the one before, and nothing
        # of the evaluation before the first.
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.trainer.fit_loop.total_batch_idx + 1)
        if not self.trainer.sanity_checking:
            self.log_dict(metrics, logger=False)

    def _with_intervals(self, prefix: str, values: dict[str, Tensor]) -> dict[str, float]:
        """The means over the problems of all ranks, and the ends of their intervals."""
        means = ProblemMeans(*values, sync_on_compute=self.trainer.world_size > 1).to(self.device)
        means.update({name: value.to(self.device) for name, value in values.items()})
        found: dict[str, float] = {}
        for name, (mean, low, high) in means.compute().items():
            found |= {f"{prefix}/{name}": mean, f"{prefix}/{name}/low": low, f"{prefix}/{name}/high": high}
        return found

    def on_test_epoch_start(self) -> None:
        """As for validation."""
        self.on_validation_epoch_start()

    def test_step(self, results: list[Evaluated], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As for validation."""
        self.validation_step(results, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """As for validation."""
        self.on_validation_epoch_end()

    # What is logged

    def _measure(self, rollout: Rollout, tokens: Tensor, entropy: Tensor, penalty: Tensor) -> None:
        scored = ~rollout.rewards.isnan()
        self.means.update(
            {
                "train/reward": rollout.rewards[scored],
                "train/unscored_fraction": ~scored,
                "train/response_length": rollout.response_lengths,
                "train/truncated_fraction": rollout.truncated,
                "train/weight_lag": self.trainer.fit_loop.total_batch_idx - rollout.weight_versions,
                "train/discarded_per_group": torch.tensor(rollout.discarded_groups * rollout.group_size / len(rollout)),
                "train/entropy": entropy[tokens],
                "lagrangian/penalty_mean": penalty[tokens],
            }
        )
        largest = torch.cat([penalty[tokens], penalty.new_zeros(1)]).max()
        self.log("lagrangian/penalty_max", data_parallel_reduce(self.trainer.strategy, largest, dist.ReduceOp.MAX))
        self._tokens = self._sum(torch.stack([rollout.response_lengths.sum(), rollout.prompt_lengths.sum()]))
        self._log_rewards(rollout)

    def _log_rewards(self, rollout: Rollout) -> None:
        parts = list(rollout.reward_parts.values())
        sums = [part.nansum() for part in parts] + [(~part.isnan()).sum() for part in parts]
        counters = [torch.tensor(float(count)) for count in (rollout.reward_timeouts, rollout.reward_errors)]
        totals = self._sum(torch.stack([*(value.double().cpu() for value in sums), *counters]))
        for i, name in enumerate(rollout.reward_parts):
            self.log(f"reward/{name}", (totals[i] / totals[len(parts) + i]).float())
        self.log_dict({"reward/timeouts": totals[-2].float(), "reward/errors": totals[-1].float()})

    def _log_metrics(self) -> None:
        # Of what has no value now, Lightning would log the last one again.
        values = dict.fromkeys(self._logged, torch.tensor(torch.nan))
        of_weights = [self.of_weights] if self.corrections else []
        for metric in (self.means, self.of_discrepancy, self.of_mismatch, *of_weights):
            values |= metric.compute()
            metric.reset()
        self._logged = list(values)
        for name, value in values.items():
            self.log(name, value.float(), prog_bar=name in ("train/reward", "discrepancy/sequence_mean"))

    def on_train_batch_end(self, outputs: Any, batch: Rollout, batch_idx: int) -> None:
        """Log the times of the whole step, the callbacks' part included."""
        seconds = phases.take()
        if self.sampling_policy is not None:  # what was timed is the drawing of the next rollout
            seconds = {name: value for name, value in seconds.items() if name != "reward"} | {"rollout": batch.seconds}
        self.log_dict({f"time/{name}_s": value for name, value in seconds.items()})
        response_tokens, prompt_tokens = self._tokens.tolist()
        self.log("perf/rollout_tokens_per_s", response_tokens / max(batch.seconds, 1e-9))
        trained = response_tokens + prompt_tokens
        self.log("perf/train_tokens_per_s", trained / max(seconds["score"] + seconds["update"], 1e-9))

    def _sum(self, values: Tensor) -> Tensor:
        return data_parallel_reduce(self.trainer.strategy, values.to(self.device))

    def _gather(self, values: Tensor) -> Tensor:
        return data_parallel_gather(self.trainer.strategy, values)
