"""Problems in, rollouts out: the loader generates when the trainer asks, with the weights of that moment."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dclightning.advantages import advantages, check_group_size
from dclightning.data.benchmarks import BENCHMARKS
from dclightning.data.cleaning import faults
from dclightning.data.problems import Problem, Source, load_problems
from dclightning.errors import RunStoppedError, UserError
from dclightning.evaluation import Evaluated, compares_answers, evaluated
from dclightning.models import load_tokenizer, longest_context, resolve_model
from dclightning.rewards.math import MathReward
from dclightning.rewards.scoring import OnError, Reward, Scorer, reward_name
from dclightning.rollout.ahead import Ahead
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.responses import encode_prompt, respond
from dclightning.rollout.shares import Shares
from dclightning.rollout.types import Rollout, Sampling
from dclightning.seeds import derive_seed
from dclightning.strategies import tensor_parallel_gather

log = logging.getLogger(__name__)


class RolloutDataModule(L.LightningDataModule):
    """Streams rollouts: problems, prompts, the engine's responses, their rewards.

    One batch is one rollout. An epoch is one pass over the problems; what does not fill a last rollout waits for the
    next epoch's order.

    Args:
        problems: To train on: a file, a dataset of the hub or what ships with the package, alone or with the names of
            its fields; or a list.
        engine: Samples the responses.
        reward: Scores them: an object such as ``MathReward()``, or a function, plain or async, of problems and
            completions.
        extra_rewards: More of them by name, which are added.
        reward_weights: By name how much each reward counts; 1 by default. One of weight 0 is logged only.
        reward_errors: What happens to a response for which a reward fails: ``skip`` leaves it out of the training,
            ``stop`` stops the run. If a reward fails for all responses, the run stops in any case.
        prompts_per_step: Problems in a rollout, over all ranks.
        group_size: Responses to each of them.
        dynamic_sampling: How often to try another problem where all responses to one got the same reward, so that no
            sibling is better than another; 0 keeps such groups. If some are left after the last try, the run stops.
        sampling: How training responses are drawn. Truncated support (top_p, top_k, min_p) and temperature 0 are
            refused, because the trainer could not compute the sampled tokens' true probabilities.
        validation_problems: By name, what to evaluate on: problems as above, or the name of a benchmark.
        validation_reward: Scores the responses to them; by default ``reward``.
        validation_sampling: How validation responses are drawn.
        validation_samples: Responses to each validation problem, k of avg@k. By default what the paper has for the
            benchmark, and 1 for others.
        validation_limit: Use only so many problems of each benchmark.
        system_prompt: Goes before each problem as a system message.
        prompt_template: Turns a problem into the user's message; ``{problem}`` stands for it.
        chat_template_options: What the tokenizer's chat template takes besides, such as ``enable_thinking``.
        max_prompt_tokens: Leave out problems to train on whose prompts are longer.
        training_engine: Samples responses to the validation problems from the training policy, too, such as
            ``TransformersEngine()``, so that the gap to the deployed one can be seen.
        one_step_off: Whether the next rollout is drawn while the update runs. Each one is then sampled with the weights
            before the last update; its discrepancy and its probability ratios are still those of the weights that
            sampled it, of which the trainer keeps a copy.
        seed: Decides the order of the problems and every sampled token.
    """

    def __init__(
        self,
        problems: str | Source | list[Problem],
        engine: RolloutEngine,
        reward: Reward = MathReward(),
        extra_rewards: dict[str, Reward] | None = None,
        reward_weights: dict[str, float] | None = None,
        reward_errors: OnError = "skip",
        prompts_per_step: int = 64,
        group_size: int = 8,
        dynamic_sampling: int = 0,
        sampling: Sampling = Sampling(),
        validation_problems: dict[str, str | Source] | None = None,
        validation_reward: Reward | None = None,
        validation_sampling: Sampling = Sampling(max_tokens=32768, temperature=0.7),
        validation_samples: int | None = None,
        validation_limit: int | None = None,
        system_prompt: str | None = None,
        prompt_template: str = "{problem}",
        chat_template_options: dict[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        training_engine: RolloutEngine | None = None,
        one_step_off: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if prompts_per_step < 1:
            raise ValueError(f"prompts_per_step={prompts_per_step}: must be at least 1")
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: must be at least 1")
        if dynamic_sampling < 0:
            raise ValueError(f"dynamic_sampling={dynamic_sampling}: must not be negative")
        if dynamic_sampling and group_size < 2:
            raise ValueError(f"dynamic_sampling={dynamic_sampling}: groups of 1 are all alike; set it to 0")
        if validation_samples is not None and validation_samples < 1:
            raise ValueError(f"validation_samples={validation_samples}: must be at least 1")
        if validation_limit is not None and validation_limit < 1:
            raise ValueError(f"validation_limit={validation_limit}: must be at least 1")
        if (validation_samples or 0) > 1 and validation_sampling.temperature == 0:
            raise ValueError(
                f"validation_samples={validation_samples}: at temperature 0 all samples are the same; use 1"
            )
        if slashed := [name for name in validation_problems or {} if "/" in name]:
            raise ValueError(f"validation_problems: the name {slashed[0]!r} must not contain a slash")
        if not sampling.covers_all_tokens:
            raise ValueError(
                f"sampling: temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={sampling.top_k}, "
                f"min_p={sampling.min_p}: training needs temperature > 0, top_p=1, top_k=0, min_p=0, or tokens would "
                "have other probabilities than the trainer computes"
            )
        if "{problem}" not in prompt_template:
            raise ValueError(f"prompt_template={prompt_template!r}: must contain {{problem}}")
        self.problems = problems
        self.engine = engine
        name, extra = reward_name(reward), extra_rewards or {}
        if name in extra:
            raise ValueError(f"extra_rewards: reward has the name {name!r} already; choose another one")
        self.scorer = Scorer({name: reward, **extra}, reward_weights, reward_errors)
        self.validation_scorer = Scorer({"validation": validation_reward or reward}, on_error=reward_errors)
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.dynamic_sampling = dynamic_sampling
        self.sampling = sampling
        self.validation_problems = validation_problems or {}
        self.validation_sampling = validation_sampling
        self.validation_samples = validation_samples
        self.validation_limit = validation_limit
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat_template_options = chat_template_options
        self.max_prompt_tokens = max_prompt_tokens
        self.training_engine = training_engine
        self.one_step_off = one_step_off
        self.seed = seed
        self.shares = Shares()
        self.ahead = Ahead()
        """The next rollout, if it is drawn already."""
        self._validation_stopped: RunStoppedError | None = None
        self.step = 0
        """Rollouts drawn so far: with the seed, all there is to know about where in the data the run stands."""

    def setup(self, stage: str) -> None:
        """Read the problems and start the engine."""
        trainer: Any = self.trainer
        model = trainer.lightning_module.model_name
        spanned = getattr(self.engine, "tensor_parallel_size", 1)
        shared = getattr(trainer.strategy, "tensor_parallel_size", 1)
        self.shares = Shares(trainer.world_size, trainer.global_rank, shared, spanned)
        self.check_engine()
        if spanned > 1 and stage == "predict":
            raise UserError(f"engine tensor_parallel_size={spanned}: must be 1 here, where each rank asks by itself")
        self.tokenizer = load_tokenizer(model)
        self.benchmarks: dict[str, list[Problem]] = {}
        self.samples: dict[str, int] = {}
        for name, source in self.validation_problems.items():
            known = BENCHMARKS.get(source) if isinstance(source, str) else None
            problems = load_problems(known.source if known else source, f"validation_problems.{name}")
            self.benchmarks[name] = problems[: self.validation_limit]
            papers = known or BENCHMARKS.get(name)
            self.samples[name] = self.validation_samples or (papers.samples if papers else 1)
            if self.samples[name] > 1 and self.validation_sampling.temperature == 0:
                number = f"validation_samples={self.samples[name]} ({name})"
                raise UserError(f"{number}: at temperature 0 all samples are the same; use 1")
        longest = max((self._longest(p, self.validation_sampling) for p in self.benchmarks.values()), default=0)
        if stage in ("fit", "predict"):
            self.training_problems = self._short_enough(load_problems(self.problems))
            self._report_faults()
            if len(self.training_problems) < self.prompts_per_step:
                raise UserError(
                    f"prompts_per_step={self.prompts_per_step}: there are only {len(self.training_problems)} problems"
                )
            self.check_shares(self.shares, trainer.lightning_module.mini_batches)
            check_group_size(self.group_size, trainer.lightning_module.advantage)
            longest = max(longest, self._longest(self.training_problems, self.sampling))
        elif not self.benchmarks:
            raise UserError("validation_problems is empty: name at least one benchmark and its problems")
        if longest > (limit := longest_context(model)):
            raise UserError(
                f"max_tokens: the longest prompt and response make {longest} tokens, model={model!r} takes {limit}; "
                "set sampling and validation_sampling, or max_prompt_tokens for what is trained on"
            )
        self.engine.start(resolve_model(model), longest)
        if self.training_engine is not None:
            self.training_engine.start(resolve_model(model), longest)

    def check_engine(self) -> None:
        """Refuse what the engine's settings and the drawing's cannot be together."""
        spanned = getattr(self.engine, "tensor_parallel_size", 1)
        for name in ("dynamic_sampling", "one_step_off"):
            if spanned > 1 and (value := getattr(self, name)):
                raise UserError(f"{name}={value}: needs an engine on each rank; set its tensor_parallel_size to 1")
        if self.one_step_off and getattr(self.engine, "sleep", False):
            raise UserError("one_step_off=True: the engine draws during the update; set its sleep to false")

    def check_shares(self, shares: Shares, mini_batches: int) -> None:
        """Refuse a number of prompts that ranks, or a rank's optimizer steps, cannot share evenly."""
        if self.prompts_per_step % (multiple := shares.prompts_multiple):
            raise UserError(
                f"prompts_per_step={self.prompts_per_step}: must be a multiple of {multiple}, so that ranks have "
                "equal shares"
            )
        if (prompts := self.prompts_per_step // shares.replicas) % mini_batches:
            raise UserError(
                f"mini_batches={mini_batches}: must divide the prompts of a rollout on each rank, {prompts}"
            )

    def train_dataloader(self) -> "RolloutLoader":
        """Rollouts from where the run stands to the end of the epoch."""
        per_epoch = len(self.training_problems) // self.prompts_per_step

        def rollouts() -> Iterator[Rollout]:
            while True:  # the trainer knows when its epoch ends
                self._stop_if_asked_to()
                yield self.next_rollout()

        return RolloutLoader(rollouts, per_epoch)

    def predict_dataloader(self) -> "RolloutLoader":
        """The same rollouts, to be looked at only."""
        return self.train_dataloader()

    def val_dataloader(self) -> list["RolloutLoader"]:
        """For each benchmark and policy the problems with their responses, as many at a time as a rollout has."""
        return [self._benchmark_loader(benchmark, policy) for benchmark, policy in self.evaluations]

    @property
    def has_majorities(self) -> bool:
        """Whether there is a maj@k: whether the validation reward compares answers."""
        return compares_answers(self.validation_scorer.rewards["validation"])

    @property
    def evaluations(self) -> list[tuple[str, str]]:
        """The benchmark and the policy of each validation loader."""
        policies = ["deployed"] if self.training_engine is None else ["deployed", "training"]
        return [(benchmark, policy) for benchmark in self.benchmarks for policy in policies]

    def test_dataloader(self) -> list["RolloutLoader"]:
        """The same as for validation."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move rollouts; what evaluations are made of has no tensors."""
        return batch.to(device) if isinstance(batch, Rollout) else batch

    def next_rollout(self) -> Rollout:
        """This rank's share of the next training step's rollout."""
        stopped: RunStoppedError | None = None
        try:
            rollout = self.ahead.take() or self._drawn(self.step)
        except RunStoppedError as error:
            stopped = error
        self._stop_together(stopped)
        self.step += 1
        return self.shares.learnt(tensor_parallel_gather(self.trainer.strategy, rollout))  # type: ignore[union-attr]

    def during_update(self, last: bool) -> None:
        """What the engine does meanwhile: draw the next rollout, unless this is the last one, or make room."""
        if not self.one_step_off:
            self.engine.make_room()
        elif not last:
            self.ahead.begin(partial(self._drawn, self.step))

    def _drawn(self, step: int) -> Rollout:
        """What this rank's engine draws for a training step."""
        start = time.perf_counter()
        per_epoch = len(self.training_problems) // self.prompts_per_step
        epoch, index = divmod(step, per_epoch)
        order = torch.randperm(
            len(self.training_problems), generator=torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        ).tolist()
        chosen = order[index * self.prompts_per_step : (index + 1) * self.prompts_per_step]
        problems = [self.training_problems[i] for i in self.shares.drawn(chosen)]
        seed = derive_seed(self.seed, "rollout", step, self.shares.engine)
        rollout = self.draw(problems, self.sampling, self.group_size, seed)
        if self.dynamic_sampling:
            others = order[: index * self.prompts_per_step] + order[(index + 1) * self.prompts_per_step :]
            rollout = self._redraw(rollout, others if len(others) >= self.prompts_per_step else order, step)
        return replace(rollout, seconds=time.perf_counter() - start)

    def end_validation(self) -> None:
        """Stop the run if a rank could not score its share of the validation problems."""
        stopped, self._validation_stopped = self._validation_stopped, None
        self._stop_together(stopped)

    def _stop_together(self, stopped: RunStoppedError | None) -> None:
        """Raise on all ranks what one of them has met, or the others would wait for it for ever."""
        strategy: Any = self.trainer.strategy  # type: ignore[union-attr]
        if strategy.reduce_boolean_decision(stopped is not None, all=False):
            raise stopped or RunStoppedError("another rank has stopped the run")

    def _redraw(self, rollout: Rollout, others: list[int], step: int) -> Rollout:
        """Replace groups of equal rewards by groups for other problems, drawn at random, until none is left."""
        size = self.group_size
        for attempt in range(self.dynamic_sampling + 1):
            differ = advantages(rollout.rewards, size, "no-std").view(-1, size).any(-1)
            alike = (~differ).nonzero().flatten().tolist()
            if not alike or attempt == self.dynamic_sampling:
                break
            seed = derive_seed(self.seed, "redraw", step, attempt, self.shares.engine)
            picks = random.Random(seed).sample(others, k=len(alike))
            fresh = self.draw([self.training_problems[i] for i in picks], self.sampling, size, seed)
            groups = list(range(len(differ)))
            for n, group in enumerate(alike):
                groups[group] = len(differ) + n
            rollout = (rollout + fresh).select([group * size + i for group in groups for i in range(size)])
            rollout.discarded_groups += len(alike)
        if alike:
            raise RunStoppedError(
                f"dynamic_sampling={self.dynamic_sampling}: after so many tries {len(alike)} of {len(differ)} "
                "groups still have equal rewards; allow more tries, or easier or harder problems"
            )
        return rollout

    def draw(self, problems: list[Problem], sampling: Sampling, group_size: int, seed: int) -> Rollout:
        """Sample and score ``group_size`` responses to each problem."""
        prompts = [self.encode(problem) for problem in problems]
        completions, scores = respond(
            self.engine, self.tokenizer, problems, prompts, self.scorer, sampling, group_size, seed
        )
        return Rollout.of(prompts, completions, scores, sampling, group_size, self.engine.version)

    def encode(self, problem: Problem) -> list[int]:
        """The token ids that a problem is asked with."""
        options = self.chat_template_options
        return encode_prompt(self.tokenizer, problem, self.system_prompt, self.prompt_template, options)

    def state_dict(self) -> dict[str, Any]:
        """Where in the data the run stands; the same on every rank."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""
        self.step = state_dict["step"]

    def teardown(self, stage: str) -> None:
        """Shut the engine down, and what the rewards have started."""
        self.ahead.cancel(self.engine.interrupt)
        self.engine.close()
        if self.training_engine is not None:
            self.training_engine.close()
        self.scorer.close()
        if self.validation_scorer.rewards["validation"] not in self.scorer.rewards.values():
            self.validation_scorer.close()

    def on_exception(self, exception: BaseException) -> None:
        """Shut everything down: on an error nothing calls ``teardown``."""
        self.teardown("")

    def _stop_if_asked_to(self) -> None:
        """Answer SIGTERM between rollouts; one process alone would otherwise train to the end of the epoch."""
        trainer: Any = self.trainer
        if trainer.received_sigterm and trainer.world_size == 1:
            raise SIGTERMException

    def _benchmark_loader(self, name: str, policy: str) -> "RolloutLoader":
        engines, place, samples = self.shares.engines, self.shares.engine, self.samples[name]
        mine = self.benchmarks[name][place::engines]
        size = max(1, self.prompts_per_step * self.group_size // engines // samples)
        # As many on each rank, if with nothing in them: ranks meet in between.
        most = -(-len(self.benchmarks[name]) // engines)
        chunks = [mine[i : i + size] for i in range(0, most, size)]
        scorer = self.validation_scorer

        def responses() -> Iterator[list[Evaluated]]:
            engine: Any = self.engine if policy == "deployed" else self.training_engine
            for i, chunk in enumerate(chunks):
                # The same seed each time: two evaluations differ by the policy, not by luck.
                seed = derive_seed(self.seed, "validation", name, i, place)
                prompts, sampling = [self.encode(problem) for problem in chunk], self.validation_sampling
                try:
                    if chunk and self._validation_stopped is None:
                        found = respond(engine, self.tokenizer, chunk, prompts, scorer, sampling, samples, seed)
                        results = evaluated(chunk, *found, scorer.rewards["validation"])
                        yield results if self.shares.leads_engine else []  # each response counts once
                        continue
                except RunStoppedError as error:  # other ranks have other problems; all stop when all are through
                    self._validation_stopped = error
                yield []

        return RolloutLoader(responses, len(chunks))

    def _report_faults(self) -> None:
        """Say what is wrong with problems that are not the package's own."""
        path = self.problems.path if isinstance(self.problems, Source) else self.problems
        if not isinstance(path, str) or path.startswith("dclightning/"):
            return
        counts = Counter(faults(self.training_problems, self.benchmarks).values())
        del counts["image"]
        if counts:
            found = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
            log.warning(
                "problems=%r: of %d, %s; dclightning prepare drops them", path, len(self.training_problems), found
            )

    def _short_enough(self, problems: list[Problem]) -> list[Problem]:
        if self.max_prompt_tokens is None:
            return problems
        short = [problem for problem in problems if len(self.encode(problem)) <= self.max_prompt_tokens]
        if len(short) < len(problems):
            longer = len(problems) - len(short)
            log.warning(
                "max_prompt_tokens=%d: %d of %d problems are left out", self.max_prompt_tokens, longer, len(problems)
            )
        return short

    def _longest(self, problems: list[Problem], sampling: Sampling) -> int:
        return max(len(self.encode(problem)) for problem in problems) + sampling.max_tokens


class RolloutLoader:
    """Rollouts, or what evaluations are made of, drawn one at a time when they are asked for.

    It has a length because Lightning fetches one batch ahead from loaders without: that one would have been sampled
    with stale weights.
    """

    def __init__(self, rollouts: Callable[[], Iterator[Any]], length: int) -> None:
        self.rollouts = rollouts
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return self.rollouts()

    def __len__(self) -> int:
        return self.length
